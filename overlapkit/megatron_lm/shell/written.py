"""Scripts that a script writes: ``cat > run.sh <<EOF``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from overlapkit.megatron_lm.shell.expansion import Expansion
from overlapkit.megatron_lm.shell.text import Text, known
from overlapkit.megatron_lm.shell.tree import Redirect

_NO_SCRIPT = (".py", ".json", ".yaml", ".yml", ".txt", ".toml", ".cfg", ".md", ".xml", ".ini", ".conf")
_STREAM = re.compile(r"/dev/(null|std\w+|tty|fd/.*)")


def base(text: Text) -> str:
    """The last part of a file's name; what is unknown in it as it is written."""
    return "".join(piece.written if piece.text is None else piece.text for piece in text).rsplit("/", 1)[-1]


def targets(fields: Sequence[Text], redirects: Sequence[Redirect], expansion: Expansion) -> list[Text]:
    """The files that `cat` or `tee` writes: not a stream, which shows a text to somebody."""
    found = [
        expansion.text(redirect.target.segments)
        for redirect in redirects
        if redirect.operator in (">", ">>", ">|", "&>", "&>>", ">&")
        and not (redirect.operator == ">&" and re.fullmatch(r"\d+|-", redirect.target.raw))
    ]
    if known(fields[0]) == "tee":
        found += [field for field in fields[1:] if not (known(field) or "").startswith("-")]
    return [text for text in found if not _STREAM.fullmatch(known(text) or "") and not base(text).endswith(_NO_SCRIPT)]
