"""Megatron-Bridge's CommOverlapConfig, with the same fields, defaults and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from overlapkit.comm_overlap.userbuffers import Lockable

if TYPE_CHECKING:
    from overlapkit.plan import Plan
    from overlapkit.recipe import Recipe

OnError = Literal["refuse", "warn"]


@dataclass(kw_only=True)
class CommOverlapConfig(Lockable):
    """What overlaps, as the user asks for it; None is left to the set-up.

    It stands where Bridge's class of that name does: in a recipe, in overrides, in ``runtime_config_update``.
    Only YAML that Bridge is to read again needs Bridge's own class, which ``to_bridge`` returns.

    ``bucket_size`` counts parameters; ``wgrad_deferral_limit`` microbatches; ``data_parallel_size`` GPUs, without
    context parallelism, and Bridge overwrites it. ``tp_comm_overlap_cfg`` is a TransformerLayerTPOverlapCfg or None,
    or what Bridge refuses: a preset's name (as an override on the command line gives it), the path of a YAML file, or a
    mapping of layers.
    """

    tp_comm_overlap: bool
    tp_comm_overlap_cfg: Any = None  # OmegaConf.structured takes no union of what may stand here
    tp_comm_bootstrap_backend: str | None = "nccl"
    overlap_p2p_comm: bool | None = None
    batch_p2p_comm: bool | None = None
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    overlap_param_gather_with_optimizer_step: bool | None = None
    align_param_gather: bool | None = None
    bucket_size: int | None = None
    defer_embedding_wgrad_compute: bool | None = None
    wgrad_deferral_limit: int | None = None
    data_parallel_size: int | None = None
    overlap_moe_expert_parallel_comm: bool | None = None
    delay_wgrad_compute: bool | None = None

    def finalize(self) -> None:
        """Keep what the user asks for, as ``user_comm_overlap_cfg``; a field that is set after it does not count.

        Only the first call does anything.
        """
        if getattr(self, "user_comm_overlap_cfg", None) is None:
            asked = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "data_parallel_size"}
            self.user_comm_overlap_cfg = SimpleNamespace(**asked)

    def setup(
        self,
        model_config: Any,
        optimizer_config: Any,
        ddp_config: Any,
        *,
        software: Mapping[str, Any] | None = None,
    ) -> None:
        """Set on the objects what Bridge's own set-up would.

        Any objects will do that have the attributes. Optimizer and DDP are set with the distributed optimizer only.
        What is turned off or lost is logged to ``overlapkit.comm_overlap``, with the rule's code.
        ``software`` is that section of a recipe, for instance ``{"megatron_bridge": "0.6.2", "transformer_engine":
        None}``; without it, what is installed here. The snapshot of ``finalize``, which it calls if need be, stays as
        it is: a second set-up, of another model, starts from what the user asked for, not from what the first left.

        Raises:
            SetupError: Bridge's set-up would raise; the objects are as they were.
            RecipeError: a value that no configuration can have.
        """
        from overlapkit.comm_overlap.setup import set_up

        self.finalize()
        set_up(self, model_config, optimizer_config, ddp_config, software)

    @property
    def plan(self) -> Plan | None:
        """The plan that the configuration was built from, as it was then; None for one that was built by hand."""
        return self.__dict__.get("_plan")

    @property
    def env(self) -> dict[str, str]:
        """What the plan exports before launch; empty for a configuration that was built by hand."""
        return dict(self.plan.env) if self.plan else {}

    @classmethod
    def from_recipe(
        cls,
        recipe: str | Path | Mapping[str, Any] | Recipe,
        overrides: Sequence[str] = (),
        *,
        on_error: OnError = "refuse",
    ) -> CommOverlapConfig:
        """The configuration with which Bridge's set-up ends at the settings of the recipe's plan.

        ``recipe`` and ``overrides`` are those of ``overlapkit.resolve``. A plan with errors is refused, or, with
        ``on_error="warn"``, taken and its errors logged.

        Raises:
            PlanError: the plan has errors.
            RecipeError: the recipe cannot be used, is for Megatron-LM, or says ``comm_overlap: null``.
        """
        from overlapkit.comm_overlap.builders import values_of
        from overlapkit.resolver import read_recipe

        values, plan = values_of(read_recipe(recipe, overrides), on_error)
        return cls._planned(values, plan)

    @classmethod
    def decide(
        cls,
        *,
        gpu: str,
        num_gpus: int,
        precision: str | Mapping[str, Any],
        tensor_model_parallel_size: int = 1,
        sequence_parallel: bool | None = None,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int | None = None,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        num_layers: int | None = None,
        hidden_size: int | None = None,
        seq_length: int | None = None,
        num_moe_experts: int | None = None,
        micro_batch_size: int | None = None,
        global_batch_size: int | None = None,
        use_distributed_optimizer: bool = True,
        tp_comm_overlap: bool | Literal["auto"] = "auto",
        software: Mapping[str, Any] | None = None,
        overrides: Sequence[str] = (),
        on_error: OnError = "refuse",
    ) -> CommOverlapConfig:
        """The configuration that fits these facts: what can overlap does, and the nearest preset is chosen.

        ``gpu`` is a name such as ``h100``; ``precision`` bf16, fp16, a name of Bridge's such as ``bf16_mixed``, or a
        mapping of its fields. ``sequence_parallel`` is taken for on where TP is above 1. Sizes: ``hidden_size`` in
        elements, ``seq_length`` in tokens, batches in sequences; hidden size, sequence length and microbatch are
        needed to choose a preset. ``software`` is that section of a recipe; without it the newest versions known.
        ``overrides`` say the rest, as ``section.key=value``.

        Raises:
            PlanError: the plan has errors, and ``on_error`` is not ``warn``.
            RecipeError: a value that no recipe can have.
        """
        from overlapkit.comm_overlap.builders import SHORT_PRECISIONS, values_of
        from overlapkit.recipe import recipe_from_mapping

        if sequence_parallel is None:
            sequence_parallel = isinstance(tensor_model_parallel_size, int) and tensor_model_parallel_size > 1
        mapping = {
            "cluster": {"gpu": gpu, "num_gpus": num_gpus},
            "software": software,
            "model": {
                "tensor_model_parallel_size": tensor_model_parallel_size,
                "sequence_parallel": sequence_parallel,
                "pipeline_model_parallel_size": pipeline_model_parallel_size,
                "virtual_pipeline_model_parallel_size": virtual_pipeline_model_parallel_size,
                "context_parallel_size": context_parallel_size,
                "expert_model_parallel_size": expert_model_parallel_size,
                "num_layers": num_layers,
                "hidden_size": hidden_size,
                "seq_length": seq_length,
                "num_moe_experts": num_moe_experts,
            },
            "train": {"micro_batch_size": micro_batch_size, "global_batch_size": global_batch_size},
            "optimizer": {"use_distributed_optimizer": use_distributed_optimizer},
            "ddp": {"use_distributed_optimizer": use_distributed_optimizer},
            "mixed_precision": SHORT_PRECISIONS.get(precision, precision) if isinstance(precision, str) else precision,
            "comm_overlap": {"tp_comm_overlap": tp_comm_overlap},
        }
        recipe = recipe_from_mapping(mapping, overrides, source="CommOverlapConfig.decide")
        values, plan = values_of(recipe, on_error)
        return cls._planned(values, plan)

    @classmethod
    def _planned(cls, values: Mapping[str, Any], plan: Plan) -> CommOverlapConfig:
        config = cls(**values)
        config._plan = plan
        return config

    def to_bridge(self) -> Any:
        """The same as ``megatron.bridge.training.comm_overlap.CommOverlapConfig``, its userbuffers in Bridge's classes.

        Raises:
            MissingPackageError: Bridge, or what its import needs, is not installed here.
            RecipeError: userbuffers that Bridge's classes cannot hold.
        """
        from overlapkit.integrations.bridge import comm_overlap_config

        return comm_overlap_config(self)
