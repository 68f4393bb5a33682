# SPDX-License-Identifier: Apache-2.0
"""Sphinx: README, changelog, docs/*.md, and a reference from the docstrings (``make docs``).

The source folder is the repository itself, so that one set of links works in a checkout, on a code
host and on the site.
"""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
# Of optional packages that are absent where the site is built.
warnings.filterwarnings("ignore")
for noisy in ("megatron", "torch.utils.cpp_extension"):
    logging.getLogger(noisy).setLevel(logging.ERROR)

from megatron.linear_cp.version import __version__  # noqa: E402

project = "megatron-linear-cp"
version = release = __version__
copyright = "the megatron-linear-cp authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "docs/*.md", "examples/*/README.md"]
exclude_patterns = [".*", "build", "dist", "megatron", "requirements", "tests", "tools"]

html_theme = "furo"
html_title = f"{project} {version}"
html_copy_source = False
html_extra_path = ["html_extra"]

myst_heading_anchors = 3
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# Strict: a reference that leads nowhere fails the build (-W). What other projects define has no
# page here.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!megatron\.linear_cp\b).*")]
nitpick_ignore = [("py:class", "megatron.linear_cp.segments.T")]  # a type variable


def shorten_config(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: Any
) -> tuple[str, Any] | None:
    """A config takes every field of Megatron-Core's: name those that are ours."""
    if name.endswith(".TransformerConfig"):
        own = ", ".join(f"{field}={default!r}" for field, default in _own_fields())
        return f"({own}, **fields_of_megatron_core)", returns
    return None


def _own_fields() -> list[tuple[str, Any]]:
    from dataclasses import fields

    from megatron.linear_cp import LinearCPConfigMixin

    return [(field.name, field.default) for field in fields(LinearCPConfigMixin)]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", shorten_config)
