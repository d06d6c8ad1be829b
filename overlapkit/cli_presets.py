"""The verbs of ``overlapkit presets``."""

from __future__ import annotations

import sys
from enum import Enum
from typing import Annotated, Any, Optional

import typer

from overlapkit.cli_options import DataFormat, FailOn

presets_app = typer.Typer(
    help="Userbuffers presets: what there is, what is in one, and what Transformer Engine makes of it.",
    no_args_is_help=True,
)


class PresetFormat(str, Enum):
    text = "text"
    json = "json"
    yaml = "yaml"
    te = "te"
    megatron_lm = "megatron-lm"
    bridge = "bridge"
    python = "python"


class ShownFormat(str, Enum):
    text = "text"
    json = "json"


class Precision(str, Enum):
    bf16 = "bf16"
    fp8 = "fp8"


class Provenance(str, Enum):
    bridge = "bridge"
    nemo = "nemo"
    derived = "derived"


@presets_app.command("list")
def presets_list(
    gpu: Annotated[
        Optional[str],  # noqa: UP045  typer on Python 3.10 reads this form
        typer.Option(help="In any usual spelling."),
    ] = None,
    precision: Annotated[Optional[Precision], typer.Option(help="Of the GEMMs.")] = None,  # noqa: UP045
    tp: Annotated[Optional[int], typer.Option(help="Tensor-parallel size.")] = None,  # noqa: UP045
    hidden_size: Annotated[Optional[int], typer.Option(help="The model's.")] = None,  # noqa: UP045
    provenance: Annotated[Optional[Provenance], typer.Option(help="Who made it.")] = None,  # noqa: UP045
    output: Annotated[DataFormat, typer.Option("--format", "-f", help="Form of the list.")] = DataFormat.text,
) -> None:
    """The presets and what each was made for; the derived ones, computed and not tuned, come last.

    Example: overlapkit presets list --gpu h20 --tp 8
    """
    from overlapkit.presets.listing import listed

    found = listed(
        gpu=gpu,
        precision=precision.value if precision else None,
        tensor_model_parallel_size=tp,
        hidden_size=hidden_size,
        provenance=provenance.value if provenance else None,
    )
    if not found:
        _say(("no preset is like this; overlapkit presets derive RECIPE computes one",))
    if output is DataFormat.text:
        from overlapkit.render.presets import print_list

        print_list(found, sys.stdout)
    else:
        from overlapkit.presets import load_preset
        from overlapkit.render.data import write_data
        from overlapkit.render.presets import header

        names = sorted(each["name"] for each in found)
        write_data([header(load_preset(name)) for name in names], output.value, sys.stdout)


@presets_app.command("show")
def presets_show(
    name: Annotated[str, typer.Argument(help="A preset's name, as `presets list` prints it.")],
    output: Annotated[
        PresetFormat,
        typer.Option(
            "--format", "-f", metavar="FORM", help=f"One of {', '.join(form.value for form in PresetFormat)}."
        ),
    ] = PresetFormat.text,
) -> None:
    """One preset: what overlaps with what and on how many SMs, or the form that a framework reads.

    Example: overlapkit presets show userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192 --format megatron-lm
    """
    from overlapkit.presets import load_preset

    _write(load_preset(name), output)


def _write(preset: Any, output: PresetFormat) -> None:
    from overlapkit.render.data import write_data

    if output is PresetFormat.text:
        from overlapkit.render.presets import print_preset

        print_preset(preset, sys.stdout, transformer_engine=_newest())
    elif output is PresetFormat.yaml:
        write_data(preset.userbuffers, "yaml", sys.stdout)
    elif output is PresetFormat.json:
        from overlapkit.render.presets import header

        write_data({**header(preset), "userbuffers": preset.userbuffers}, "json", sys.stdout)
    else:
        text, completed = _rendered(preset, output)
        sys.stdout.write(text)
        _say(completed)


def _rendered(preset: Any, output: PresetFormat) -> tuple[str, tuple[str, ...]]:
    from overlapkit.render import preset_forms

    if output is PresetFormat.bridge:
        return preset_forms.to_bridge(preset)
    if output is PresetFormat.python:
        return preset_forms.to_python(preset)
    write = preset_forms.to_te if output is PresetFormat.te else preset_forms.to_megatron_lm
    return write(preset), ()


@presets_app.command("check")
def presets_check(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A file for --tp-comm-overlap-cfg, a dict of Transformer Engine as JSON or Python, a dump of "
            "Megatron-Bridge, or a preset.",
        ),
    ],
    transformer_engine: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="VERSION", help="The newest that is known, unless given."),
    ] = None,
    tp: Annotated[Optional[int], typer.Option(help="Tensor-parallel size.")] = None,  # noqa: UP045
    tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="seq_length · micro_batch_size / CP: rows of a buffer."),
    ] = None,
    hidden_size: Annotated[Optional[int], typer.Option(help="Columns of a buffer.")] = None,  # noqa: UP045
    quantization: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="MODES", help="none, fp8, or fp8,none for BF16 layers at the ends of an FP8 model."),
    ] = None,
    rs_dgrad: Annotated[bool, typer.Option("--rs-dgrad", help="The model has tp_comm_overlap_rs_dgrad.")] = False,
    output: Annotated[ShownFormat, typer.Option("--format", "-f", help="Form of the report.")] = ShownFormat.text,
    fail_on: Annotated[FailOn, typer.Option(help="Exit with 1 at a finding this grave or graver.")] = FailOn.error,
) -> None:
    """What Transformer Engine builds of a configuration, or why it refuses.

    Example: overlapkit presets check userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192 --transformer-engine 2.9
    """
    from overlapkit.plan import as_grave_as
    from overlapkit.presets.checking import Question, ask
    from overlapkit.presets.configurations import named_or_read

    asked = Question(
        transformer_engine=_newest() if transformer_engine is None else transformer_engine,
        tensor_model_parallel_size=tp,
        tokens=tokens,
        hidden_size=hidden_size,
        quantization_modes=None if quantization is None else tuple(quantization.split(",")),
        tp_comm_overlap_rs_dgrad=rs_dgrad,
    )
    answer = ask(named_or_read(file), asked)
    if output is ShownFormat.text:
        from overlapkit.render.userbuffers_report import print_report

        print_report(answer, sys.stdout)
    else:
        from overlapkit.render.data import write_data

        write_data(answer.report.to_dict(), "json", sys.stdout)
        if answer.assumed_tp:
            _say((f"TP {answer.tensor_model_parallel_size} is assumed; --tp says another",))
    grave = as_grave_as(fail_on.value)
    raise typer.Exit(int(any(problem.severity in grave for problem in answer.report.problems)))


@presets_app.command("diff")
def presets_diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A preset's name, or a file as `presets check` reads it.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    output: Annotated[ShownFormat, typer.Option("--format", "-f", help="Form of the answer.")] = ShownFormat.text,
) -> None:
    """What two configurations do differently, layer by layer; the exit code is 0 either way.

    Example: overlapkit presets diff userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192
    userbuffers_bf16_h800_h8192_tp4_mbs1_seqlen8192
    """
    from overlapkit.presets.configurations import named_or_read
    from overlapkit.presets.differences import difference
    from overlapkit.render import preset_difference

    one, other = named_or_read(a), named_or_read(b)
    found = difference(one, other, transformer_engine=_newest())
    if output is ShownFormat.json:
        from overlapkit.render.data import write_data

        write_data(preset_difference.to_dict(one, other, found), "json", sys.stdout)
    else:
        preset_difference.print_difference(one, other, found, sys.stdout, transformer_engine=_newest())


@presets_app.command("derive")
def presets_derive(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML recipe, or a dump of Megatron-Bridge.")],
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Overrides, applied in order."),
    ] = None,
    output: Annotated[
        Optional[PresetFormat],  # noqa: UP045
        typer.Option(
            "--format", "-f", metavar="FORM", help="A form of `presets show`; unless given, a preset's own file."
        ),
    ] = None,
) -> None:
    """A preset for the recipe's GPU, sizes and TP, from computed times: neither tuned nor measured.

    Example: overlapkit presets derive recipes/qwen3_32b_8xh20.yaml cluster.gpu=h800
    """
    from overlapkit.facts import derive
    from overlapkit.presets.derived_file import beside_tuned, preset_text
    from overlapkit.presets.files import preset_of
    from overlapkit.presets.of_model import inputs_of_recipe, refuse_what_fails, tuned_already
    from overlapkit.recipe import load_recipe

    facts = derive(load_recipe(recipe, overrides or []))
    inputs = inputs_of_recipe(facts)
    text = preset_text(inputs, beside=beside_tuned(inputs))
    refuse_what_fails(facts, inputs)
    if output is None:
        sys.stdout.write(text)
    else:
        _write(preset_of(text), output)
    tuned = tuned_already(facts)
    if tuned is not None:
        _say((f"auto would take a tuned preset: {tuned}",))


def _newest() -> str:
    """The Transformer Engine of the newest software that is known."""
    from overlapkit.catalogue import software_rows

    return software_rows()[-1].transformer_engine


def _say(sentences: tuple[str, ...]) -> None:
    from overlapkit.errors import printable

    for sentence in sentences:
        print(printable(sentence, limit=1000), file=sys.stderr)
