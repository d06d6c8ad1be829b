"""Write overlapkit/data/megatron_lm_flags.json: the flags of Megatron-LM's parsers, version by version.

    python scripts/megatron_lm_flags.py dump > megatron_lm_flags_0.19.2.json   # where that Megatron-LM can be imported
    python scripts/megatron_lm_flags.py build FOLDER           # from all dumps in FOLDER, .json or .json.gz
    python scripts/megatron_lm_flags.py build FOLDER --check   # write nothing; exit 1 when the committed file differs

``dump`` asks the real parser (``megatron.training.arguments.add_megatron_arguments``; PyTorch for CPUs is enough, the
wheels of megatron-core have it from 0.17), because most flags are generated from dataclasses and stand in no source.

In the file each flag has its variants: ``in``, the positions in the list of versions that it holds for (all when
absent), ``dest`` where it is not the flag's own name, ``do`` (``store``, ``true``, ``false``, ``boolean``, ``other``),
``n`` for more than one value (a number or argparse's ``+``, ``*``, ``?``), ``type`` and ``choices``. A dump without
``nargs`` takes those of another version; failing that, a default that is a list means several values. ``newer`` and
``older`` say what is known of versions before the first snapshot: the first version that has a flag, and flags that
none of the snapshots has any more.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "overlapkit" / "data" / "megatron_lm_flags.json"
ACTIONS = {
    "_StoreAction": "store",
    "_StoreTrueAction": "true",
    "_StoreFalseAction": "false",
    "BooleanOptionalAction": "boolean",
}
TYPES = ("int", "float", "str")
MOST_CHOICES = 12  # more are not flags of ours: signals

# The first version with a flag that the oldest snapshot has. 0.15 and 0.16: fields that the configuration dataclasses
# of megatron-core 0.14.0 or 0.15.3 lack; --no-… beside an older --disable-… came with the generated parser. The others:
# Megatron-LM's arguments.py at core_v0.12.1 and core_v0.14.0, and its changelog.
NEWER = {
    "0.13.0": "--fsdp-double-buffer --pipeline-model-parallel-layout --reuse-grad-buf-for-mxfp8-param-ag --use-nccl-ub",
    "0.14.0": "--delay-wgrad-compute --overlap-moe-expert-parallel-comm --use-megatron-fsdp",
    "0.15.0": "--activation-func-clamp-value --cuda-graph-impl --fp4-format --fp4-param-gather --fp4-recipe"
    " --glu-linear-offset --softmax-type --use-te-activation-func --window-attn-skip-freq",
    "0.16.0": "--apply-wd-to-qk-layernorm --attention-output-gate --batch-invariant-mode --dsa-indexer-head-dim"
    " --dsa-indexer-loss-coeff --dsa-indexer-n-heads --dsa-indexer-topk --dsa-indexer-use-sparse-loss"
    " --ep-overlap-early-attn-memory-release --experimental-attention-variant --fine-grained-activation-offloading"
    " --fp4-quantizer-factory --fp8-quantizer-factory --fsdp-manual-registration --hybrid-context-parallel"
    " --inference-fuse-tp-communication --kitchen-attention-backend --linear-attention-freq --linear-conv-kernel-dim"
    " --linear-key-head-dim --linear-num-key-heads --linear-num-value-heads --linear-value-head-dim"
    " --log-max-attention-logit --max-seqlen-per-dp-cp-rank --min-offloaded-tensor-size --moe-enable-routing-replay"
    " --moe-flex-dispatcher-backend --moe-hybridep-num-sms --moe-latent-size --moe-router-padding-for-quantization"
    " --moe-shared-expert-gate --mtp-standalone --muon-extra-scale-factor --muon-fp32-matmul-prec --muon-momentum"
    " --muon-no-split-qkv --muon-num-ns-steps --muon-scale-mode --muon-tp-mode --muon-use-nesterov"
    " --no-tp-comm-bulk-dgrad --no-tp-comm-bulk-wgrad --no-tp-comm-overlap-ag --no-tp-comm-overlap-rs"
    " --no-tp-comm-split-ag --no-tp-comm-split-rs --offload-modules --qk-clip --qk-clip-alpha --qk-clip-threshold"
    " --qk-l2-norm --use-kitchen-attention",
}
# Flag -> its action and the first version without it.
OLDER = {"--use-custom-fsdp": {"do": "true", "before": "0.14.0"}}


class DumpError(Exception):
    """A folder without dumps, or one that is no dump."""


def dump() -> dict[str, dict[str, Any]]:
    """Every flag of the parser that is installed here."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    rows = {}
    for action in parser._actions:
        choices = action.choices
        row = {
            "dest": action.dest,
            "cls": type(action).__name__,
            "default": repr(action.default),
            "choices": None if choices is None else [getattr(choice, "name", choice) for choice in choices],
            "type": getattr(action.type, "__name__", None),
            "nargs": action.nargs,
        }
        rows.update(dict.fromkeys(action.option_strings, row))
    return rows


def read_dumps(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Version -> its flags, the oldest first."""
    found = {}
    for path in folder.iterdir():
        match = re.search(r"(\d+\.\d+\.\d+)\.json(\.gz)?$", path.name)
        if match:
            data = path.read_bytes()
            found[match[1]] = json.loads(gzip.decompress(data) if match[2] else data)
    if not found:
        raise DumpError(f"{folder} has no dump such as megatron_lm_flags_0.19.2.json")
    return {version: found[version] for version in sorted(found, key=lambda text: tuple(map(int, text.split("."))))}


def variant(flag: str, row: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """What matters of one flag in one version."""
    spec: dict[str, Any] = {"dest": row["dest"]} if row["dest"] != flag.lstrip("-").replace("-", "_") else {}
    spec["do"] = ACTIONS.get(row["cls"], "other")
    if spec["do"] != "store":
        return spec
    known = [other["nargs"] for other in [row, *others] if "nargs" in other and other["cls"] == row["cls"]]
    nargs = known[0] if known else ("+" if row["default"].startswith("[") else None)
    if nargs is not None:
        spec["n"] = nargs
    if row["type"] in TYPES:
        spec["type"] = row["type"]
    choices = row["choices"]
    if choices and len(choices) <= MOST_CHOICES:
        spec["choices"] = [str(choice).rpartition(".")[2] for choice in choices]  # enum members by name
    return spec


def build(dumps: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """The file's content."""
    flags: dict[str, list[dict[str, Any]]] = {}
    for flag in sorted({name for rows in dumps.values() for name in rows if name.startswith("--")}):
        variants: list[dict[str, Any]] = []
        for position, rows in enumerate(dumps.values()):
            if flag not in rows:
                continue
            others = [other[flag] for other in dumps.values() if flag in other]
            spec = variant(flag, rows[flag], others)
            same = next((known for known in variants if {**known, "in": None} == {"in": None, **spec}), None)
            if same is None:
                variants.append({"in": [position], **spec})
            else:
                same["in"].append(position)
        if len(variants[0]["in"]) == len(dumps):
            del variants[0]["in"]
        flags[flag] = variants
    newer = {flag: since for since, names in NEWER.items() for flag in names.split()}
    return {"snapshots": list(dumps), "newer": dict(sorted(newer.items())), "older": OLDER, "flags": flags}


def as_text(data: dict[str, Any]) -> str:
    """JSON with a flag on each line."""
    blocks = []
    for key, value in data.items():
        if isinstance(value, dict):
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items())
            blocks.append(f" {json.dumps(key)}: {{\n{lines}\n }}")
        else:
            blocks.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The flags of Megatron-LM's parsers.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("dump", help="print the flags of the Megatron-LM that is installed here")
    builder = verbs.add_parser("build", help="write the file from dumps")
    builder.add_argument("folder", type=Path)
    builder.add_argument("--check", action="store_true", help="compare with the committed file, write nothing")
    options = parser.parse_args(arguments)
    if options.verb == "dump":
        json.dump(dump(), sys.stdout, indent=1)
        return 0
    try:
        text = as_text(build(read_dumps(options.folder)))
    except (DumpError, OSError, ValueError, KeyError) as error:
        print(f"megatron_lm_flags: {error}", file=sys.stderr)
        return 2
    if not options.check:
        DATA.write_text(text, "utf-8")
    elif DATA.read_text("utf-8") != text:
        print(f"megatron_lm_flags: {DATA} differs from the dumps. Run without --check", file=sys.stderr)
        return 1
    print(f"{DATA}: {'the same' if options.check else 'written'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
