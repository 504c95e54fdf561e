"""The page's looks, light and dark; `--series-N` are the plots' colours (see `inline_svg`)."""

STYLESHEET = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --text: #1b1f24; --muted: #59636e; --grid: #c9ced6; --line: #e1e5ea;
  --warn-page: #fff4d6; --warn-line: #d6a10a;
  --series-0: #1f6fb4; --series-1: #d1660a; --series-2: #2a8a4a; --series-3: #a63c9a;
  --series-4: #b8322e; --series-5: #6a54c4; --series-6: #7d6b1c; --series-7: #1a8a94;
  --plot-font: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --card: #1c2026; --text: #e6e9ed; --muted: #9aa4b0; --grid: #59636e; --line: #2d333b;
    --warn-page: #3a2f10; --warn-line: #d6a10a;
    --series-0: #6db3f2; --series-1: #f5a04c; --series-2: #62c983; --series-3: #dd85d2;
    --series-4: #f0817c; --series-5: #a897f5; --series-6: #cdb655; --series-7: #55cbd6;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem; max-width: 88rem; background: var(--page); color: var(--text);
  font: 1rem/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
h1 { margin: 0; font-size: 1.5rem; }
h2 { margin: 2rem 0 .5rem; font-size: 1.15rem; }
h3 { margin: 1rem 0 .25rem; font-size: 1rem; }
figure h3 { margin-top: 0; }
p { margin: .25rem 0 .75rem; max-width: 75ch; }
.muted, figcaption { color: var(--muted); font-size: .875rem; }
figcaption { max-width: 80ch; }
code { font-size: .875em; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
th, td { padding: .35rem .9rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; font-weight: normal; }
tr:last-child th, tr:last-child td { border-bottom: 0; }
td { font-variant-numeric: tabular-nums; white-space: nowrap; }
.warning {
  margin: 1rem 0; padding: .6rem 1rem; max-width: 88ch; background: var(--warn-page);
  border-left: .3rem solid var(--warn-line); border-radius: .25rem;
}
.plots { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(34rem, 100%), 1fr)); }
.plots.beside { grid-template-columns: 1fr; }
figure {
  margin: 0; padding: 1rem; overflow-x: auto;
  background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
}
figure svg { display: block; width: 100%; min-width: 26rem; height: auto; }
.beside figure svg { min-width: 48rem; }
""".strip()
