"""The commands of `aiak-ext`: options in, what `aiak_ext.analysis` computes out as text or JSON."""
