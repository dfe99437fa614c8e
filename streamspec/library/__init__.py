"""streamspec.library: bundles travel, and lie where every command finds them by name.

`archive` packs a bundle into one file and unpacks it, `download` fetches over https, `hub` from Hugging Face, `install`
pulls from any of these, `installed` is the folder of what is there, `file_list` what a bundle's files have to be,
`base_bundle` finds what a command calls a bundle, or makes it of a base, `train` trains with the bundle of a GGUF file.
"""

from __future__ import annotations
