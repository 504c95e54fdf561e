"""The photographs that scikit-image and scikit-learn bring along, with captions and questions of our own."""

from __future__ import annotations

import functools
import importlib.util
import io
import math
import random
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

SKIMAGE = ("skimage", "data")
SKLEARN = ("sklearn", "datasets/images")


@dataclass(frozen=True, kw_only=True)
class Photo:
    """A bundled picture and what can be said about it, also when its rim is cut off."""

    file: str
    caption: str
    details: str
    #: (question, answer) pairs.
    questions: tuple[tuple[str, str], ...]
    #: Package and folder in it.
    source: tuple[str, str] = SKIMAGE
    #: False where a cut would make the text wrong.
    may_crop: bool = True

    @functools.cached_property
    def image(self) -> Image.Image:
        """The picture in RGB.

        Raises:
            FileNotFoundError: The installed package does not hold the file.
        """
        package, folder = self.source
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise FileNotFoundError(f"package {package} is not installed; install the demo extra of this project")
        path = Path(spec.origin).parent / folder / self.file
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not part of this {package} release; install the pinned demo extra")
        with Image.open(path) as image:
            return image.convert("RGB")


def crop_to(photo: Photo, num_pixels: int, rng: random.Random) -> bytes:
    """A JPEG of about `num_pixels` pixels: a random cut of the photo, at a shape of its own.

    Each side of the cut keeps at least three quarters of the photo's.
    """
    image = photo.image
    if photo.may_crop:
        width = round(image.width * rng.uniform(0.75, 1.0))
        height = round(image.height * rng.uniform(0.75, 1.0))
        left, top = rng.randint(0, image.width - width), rng.randint(0, image.height - height)
        image = image.crop((left, top, left + width, top + height))
    scale = math.sqrt(num_pixels / (image.width * image.height))
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    out = io.BytesIO()
    image.resize(size, Image.Resampling.LANCZOS).save(out, format="JPEG", quality=90)
    return out.getvalue()


PHOTOS: tuple[Photo, ...] = (
    Photo(
        file="astronaut.png",
        caption="A smiling astronaut in an orange suit.",
        details="A smiling woman with short hair sits in a bright orange space suit. Her helmet is at her side, "
        "and behind her are a flag and a model of a space shuttle.",
        questions=(
            ("What colour is the suit?", "The suit is orange."),
            ("What is her job?", "She is an astronaut."),
            ("What lies beside her?", "A white helmet with a dark visor."),
            ("Does she look sad?", "No, she is smiling."),
        ),
    ),
    Photo(
        file="camera.png",
        caption="A man looks through a camera on a tripod.",
        details="A black and white photograph of a man in a dark coat. He bends over a camera that stands on a "
        "tripod in a wide meadow, with tall buildings far away.",
        questions=(
            ("Is the picture in colour?", "No, it is black and white."),
            ("What does the camera stand on?", "On a tripod with three legs."),
            ("What is he wearing?", "A long dark coat."),
            ("Where was the picture taken?", "On a lawn, with a city behind it."),
        ),
    ),
    Photo(
        file="chelsea.png",
        caption="The face of a tabby cat.",
        details="A close view of a tabby cat with green eyes and a pink nose. Its fur is ginger with dark stripes, "
        "and long white whiskers stand out on both sides.",
        questions=(
            ("Which animal is this?", "A cat."),
            ("What colour are its eyes?", "They are green."),
            ("Is the fur plain or striped?", "It is striped."),
            ("Where does it look?", "A little to the side of the camera."),
        ),
    ),
    Photo(
        file="cell.png",
        caption="A single bright cell under a microscope.",
        details="A grey microscope picture. One round bright spot with a dark ring around it, a cell, lies on an "
        "almost even background.",
        questions=(
            ("How many cells can be seen?", "One."),
            ("What shape is it?", "It is round."),
            ("Is the background bright?", "No, it is a dull grey."),
        ),
    ),
    Photo(
        file="coins.png",
        caption="Old coins laid out in rows.",
        details="A grey photograph of ancient coins on a dark table, laid out in rows. They are worn, of different "
        "sizes, and most of them show a head.",
        questions=(
            ("What are the objects?", "They are old coins."),
            ("How are they arranged?", "In rows."),
            ("Do all of them have the same size?", "No, some are larger than others."),
            ("Are they new?", "No, they are worn and very old."),
        ),
    ),
    Photo(
        file="coffee.png",
        caption="A cup of coffee on a red saucer.",
        details="An espresso in a red and white cup, on a red saucer with a small metal spoon. The table under it "
        "is made of old wood.",
        questions=(
            ("What is in the cup?", "Coffee."),
            ("What is the table made of?", "Wood."),
            ("What lies on the saucer?", "A small spoon."),
            ("What colour is the saucer?", "Red."),
        ),
    ),
    Photo(
        file="gravel.png",
        caption="A surface covered with gravel.",
        details="Grey gravel seen from above. The stones are small, have sharp edges and cover the ground completely.",
        questions=(
            ("What covers the ground?", "Gravel, small stones."),
            ("Are the stones round?", "No, their edges are sharp."),
            ("Can you see a plant?", "No, only stones."),
        ),
    ),
    Photo(
        file="brick.png",
        caption="A wall of bricks with bright joints.",
        details="A grey picture of a brick wall. The bricks are long and stand upright, and the joints between "
        "them are brighter than the bricks.",
        questions=(
            ("What is the wall made of?", "Of bricks."),
            ("Are the joints bright or dark?", "They are bright."),
            ("Is there a window?", "No, only bricks."),
        ),
    ),
    Photo(
        file="grass.png",
        caption="Grass seen from above.",
        details="A grey picture of a lawn, seen from straight above. Blades of grass and a few leaves lie over "
        "each other in every direction.",
        questions=(
            ("What grows here?", "Grass."),
            ("From where was it taken?", "From above."),
            ("Is it in colour?", "No, it is grey."),
        ),
    ),
    Photo(
        file="moon.png",
        caption="The surface of the moon.",
        details="A grey picture of the surface of the moon. There are many small craters and a few larger ones, "
        "with shadows at their rims.",
        questions=(
            ("Which body is this?", "The moon."),
            ("What are the round holes?", "They are craters."),
            ("Does anything grow there?", "No, the ground is bare."),
        ),
    ),
    Photo(
        file="hubble_deep_field.jpg",
        caption="Galaxies in deep space.",
        details="A view of deep space from a telescope. Thousands of galaxies, white, yellow, red and blue, shine "
        "as small spots on a black ground.",
        questions=(
            ("What are the bright spots?", "They are galaxies."),
            ("Which colour is the background?", "Black."),
            ("What took the picture?", "A space telescope."),
        ),
    ),
    Photo(
        file="ihc.png",
        caption="Stained tissue under a microscope.",
        details="A microscope picture of tissue from the human body. Some parts are stained brown, and the nuclei "
        "of the cells around them are blue.",
        questions=(
            ("Which stains can be seen?", "Brown and blue."),
            ("What is blue?", "The nuclei of the cells."),
            ("Was it taken with a telescope?", "No, with a microscope."),
        ),
    ),
    Photo(
        file="retina.jpg",
        caption="The retina of an eye.",
        details="The back of a human eye, round and red on black. Blood vessels spread out from a bright disc, and "
        "a darker spot lies in the middle.",
        questions=(
            ("Which part of the body is this?", "The retina, at the back of the eye."),
            ("What are the thin lines?", "They are blood vessels."),
            ("Which colour is it?", "Mostly red."),
        ),
    ),
    Photo(
        file="rocket.jpg",
        caption="A rocket on its launch pad at dusk.",
        details="A white rocket stands on a launch pad at dusk. Lamps shine at its foot, and steel masts rise "
        "around it into a dark blue sky.",
        questions=(
            ("What stands in the middle?", "A rocket."),
            ("What time of day is it?", "Dusk; the sky is dark blue."),
            ("Has it started?", "No, it still stands on the pad."),
            ("What is around it?", "Tall masts of steel."),
        ),
    ),
    Photo(
        file="motorcycle_left.png",
        caption="A red motorcycle in a garage.",
        details="A red motorcycle is parked in a garage. Behind it are a wooden bench and shelves that are full of "
        "boxes and tools.",
        questions=(
            ("Which vehicle is it?", "A motorcycle."),
            ("Which colour is it?", "Red."),
            ("Is someone riding it?", "No, it is parked."),
            ("What is behind it?", "A bench and shelves with boxes."),
        ),
    ),
    Photo(
        file="page.png",
        caption="A page with the heading Region-based segmentation.",
        details="Region-based segmentation\nLet us first determine markers of the coins and the background. These "
        "markers are pixels that we can label unambiguously as either object or background.",
        questions=(
            ("What is the heading?", "Region-based segmentation"),
            ("Is it printed or written by hand?", "It is printed."),
            ("Which objects does the text speak about?", "Coins and their background."),
        ),
        may_crop=False,
    ),
    Photo(
        file="china.jpg",
        caption="A Chinese pavilion above the trees.",
        details="A pavilion with several curved roofs, in the Chinese style, stands above green trees. It is "
        "painted in red, green and gold under a pale sky.",
        questions=(
            ("What kind of building is it?", "A pavilion with curved roofs."),
            ("What grows around it?", "Green trees."),
            ("Is it day or night?", "It is day."),
            ("In which style is it built?", "In the Chinese style."),
        ),
        source=SKLEARN,
    ),
    Photo(
        file="flower.jpg",
        caption="An orange flower in bloom.",
        details="A dahlia in full bloom. Its many petals are orange and yellow and lie in a tight round pattern; "
        "the leaves behind it are dark and out of focus.",
        questions=(
            ("Which colour are the petals?", "Orange and yellow."),
            ("Is the background sharp?", "No, it is out of focus."),
            ("What kind of flower is it?", "It looks like a dahlia."),
        ),
        source=SKLEARN,
    ),
)
