# SPDX-License-Identifier: Apache-2.0
"""Checkpoints know nothing of context parallelism: any mode and any groups read what others wrote.

Weights, moments and main parameters are cut here, by hand, from whole tensors made of their names,
so every rank knows what it must find without asking the code under test.
"""

import dataclasses
import gc
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.workers import run_distributed

MODES = ("headwise", "chunkwise", "all_gather")
# Of testing.checkpoints.HYBRID: 8 key heads and 16 value heads of 4, hidden 32, ffn 48.
QK, V, VALUE_HEADS, FFN, VOCABULARY = 32, 64, 16, 48, 64
IN_PROJ = [QK, QK, V, V, VALUE_HEADS, VALUE_HEADS]
IN_PROJ_NAMES = ["query", "key", "value", "z", "beta", "alpha"]
CONV = [QK, QK, V]
# Suffix of a parameter: the dimension that tensor parallelism cuts, and the sections of it that
# are cut each by itself. What is not here is whole on every rank.
CUTS: dict[str, tuple[int, list[int]]] = {
    "in_proj.weight": (0, IN_PROJ),
    "conv1d.weight": (0, CONV),
    "conv1d.bias": (0, CONV),
    "A_log": (0, [VALUE_HEADS]),
    "dt_bias": (0, [VALUE_HEADS]),
    "out_proj.weight": (1, [V]),
    "linear_qkv.weight": (0, [128]),
    "linear_proj.weight": (1, [64]),
    "linear_fc1.weight": (0, [FFN, FFN]),
    "linear_fc2.weight": (1, [FFN]),
    "word_embeddings.weight": (0, [VOCABULARY]),
    "output_layer.weight": (0, [VOCABULARY]),
}
MOMENTS = ("exp_avg", "exp_avg_sq")
FP32_NAMES = ("A_log", "dt_bias")
STEP = 7
COMMON = {"step": STEP, "rows_read": 19}


def whole(name: str, shape: Sequence[int]) -> torch.Tensor:
    """The whole tensor of this name, the same in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    x = torch.randn(tuple(shape), generator=generator)
    return x.abs() if name.endswith("exp_avg_sq") else x


def cut_of(name: str) -> tuple[int, list[int]] | None:
    return next((c for suffix, c in CUTS.items() if name.endswith(suffix)), None)


def expected(name: str, like: torch.Tensor, rank: int, size: int, kind: str = "") -> torch.Tensor:
    """This tensor-parallel rank's part of a parameter, or of the ``kind`` of state it has."""
    found, shape = cut_of(name), list(like.shape)
    if found is not None:
        shape[found[0]] = sum(found[1])
    full = whole(f"{name} {kind}".strip(), shape).to(like.dtype)
    if found is None:
        return full
    dim, sections = found
    return torch.cat([x.chunk(size, dim)[rank] for x in full.split(sections, dim)], dim)


def tensor_parallel() -> tuple[int, int]:
    from megatron.core import parallel_state

    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(expected(name, parameter, *tensor_parallel()))


def wrong_tensors(model: torch.nn.Module) -> list[str]:
    """Parameters that are not bitwise what they should be."""
    wrong = []
    for name, parameter in model.named_parameters():
        wanted_dtype = dtype_of(name)
        if parameter.dtype != wanted_dtype:
            wrong.append(f"{name} is {parameter.dtype}")
        elif not torch.equal(parameter, expected(name, parameter, *tensor_parallel())):
            wrong.append(name)
    return wrong


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name.endswith(FP32_NAMES) else torch.bfloat16


def zero(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)


@dataclasses.dataclass
class Trained:
    """A model and its optimizer: bf16 parameters, main parameters and moments in fp32."""

    model: torch.nn.Module
    optimizer: Any

    def state(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Name of the parameter, kind of state, tensor."""
        adam = self.optimizer.chained_optimizers[0].optimizer
        for name, parameter in self.model.named_parameters():
            yield name, "", parameter
            yield name, "main", parameter.main_param
            for kind in MOMENTS:
                yield name, kind, adam.state[parameter.main_param][kind]

    @torch.no_grad()
    def fill(self) -> None:
        for name, kind, tensor in self.state():
            tensor.copy_(expected(name, tensor, *tensor_parallel(), kind=kind))
        self.set_step(STEP)

    @torch.no_grad()
    def spoil(self) -> None:
        for _, _, tensor in self.state():
            tensor.fill_(3.0)
        self.set_step(1)

    def set_step(self, step: int) -> None:
        for state in self.optimizer.chained_optimizers[0].optimizer.state.values():
            state["step"].fill_(step)

    def wrong(self) -> list[str]:
        adam = self.optimizer.chained_optimizers[0].optimizer
        wrong = [
            f"{name} {kind}"
            for name, kind, tensor in self.state()
            if not torch.equal(tensor, expected(name, tensor, *tensor_parallel(), kind=kind))
        ]
        wrong += ["step" for state in adam.state.values() if float(state["step"]) != STEP]
        return wrong

    def spoiled(self) -> bool:
        return all(bool((tensor == 3.0).all()) for _, _, tensor in self.state())


def make_groups(tp: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    gc.collect()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, context_parallel_size=dist.get_world_size() // tp)
    model_parallel_cuda_manual_seed(1)


def make_model(mode: str) -> torch.nn.Module:
    """Ours: bf16, with A_log and dt_bias in fp32."""
    from megatron.linear_cp.testing.checkpoints import hybrid_config, hybrid_model

    config = hybrid_config(mode, bf16=True, params_dtype=torch.bfloat16, linear_cp_fp32_decay=True)
    return hybrid_model(config)


def make_upstream_model() -> torch.nn.Module:
    """Megatron-Core's own GDN class under its own config, in the same spec."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.linear_cp import get_gdn_hybrid_layer_spec
    from megatron.linear_cp.testing.checkpoints import HYBRID, hybrid_config, hybrid_model

    config = TransformerConfig(
        **HYBRID,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    spec = get_gdn_hybrid_layer_spec(hybrid_config("headwise"))
    layers = [with_upstream_gdn(layer) for layer in spec.layer_specs]
    model = hybrid_model(config, dataclasses.replace(spec, layer_specs=layers))
    kinds = [type(layer.self_attention).__module__ for layer in model.decoder.layers]
    assert all(kind.startswith("megatron.core.ssm") for kind in kinds[:3]), kinds
    return with_fp32_gates(model)


def with_upstream_gdn(layer: Any) -> Any:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet as Upstream

    from megatron.linear_cp.gated_delta_net import GatedDeltaNet

    attention = layer.submodules.self_attention
    if attention.module is not GatedDeltaNet:
        return layer
    attention = dataclasses.replace(attention, module=Upstream)
    return dataclasses.replace(
        layer, submodules=dataclasses.replace(layer.submodules, self_attention=attention)
    )


def with_fp32_gates(model: torch.nn.Module) -> torch.nn.Module:
    for name, parameter in model.named_parameters():
        if name.endswith(FP32_NAMES):
            parameter.data = parameter.data.float()
    return model


def make_trained(mode: str) -> Trained:
    """Ours in bf16 with an optimizer that has taken a step."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron.linear_cp.testing.checkpoints import hybrid_config, hybrid_model

    config = hybrid_config(mode, bf16=True, params_dtype=torch.bfloat16)
    model = hybrid_model(config)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16),
        [wrapped],
    )
    wrapped.zero_grad_buffer()
    optimizer.step()
    return Trained(model, optimizer)


# --- the module alone ---------------------------------------------------------------------------


def module_shards(module: Any, offsets: Any) -> list[tuple[dict[str, Any], Any]]:
    """Everything the sharded state dict says, shard by shard, and the data."""
    shards = []
    for name, entry in module.sharded_state_dict("layer.", offsets).items():
        parts = entry.build() if hasattr(entry, "build") else [entry]
        for part in parts:
            fields = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
            data = fields.pop("data")
            shards.append(({"name": name, "type": type(part).__name__, **fields}, data))
    return shards


def compare_module_shards(tp: int) -> dict[str, Any]:
    """Ours against Megatron-Core's, same weights, every mode; and the shards of ours."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet as Upstream

    from megatron.linear_cp.gated_delta_net import GatedDeltaNet
    from megatron.linear_cp.layer_specs import get_gated_delta_net_module_spec
    from megatron.linear_cp.testing.checkpoints import hybrid_config

    differences, counted = [], 0
    with cpu_cuda():
        make_groups(tp)
        groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        for mode in MODES:
            config = hybrid_config(mode, bf16=True, params_dtype=torch.bfloat16)
            submodules = get_gated_delta_net_module_spec(config).submodules
            ours, theirs = (
                with_fp32_gates(
                    kind(config, submodules, layer_number=1, conv_bias=True, pg_collection=groups)
                )
                for kind in (GatedDeltaNet, Upstream)
            )
            fill(ours)
            fill(theirs)
            # Alone, and as the third of five layers stacked along a first axis.
            for offsets in ((), ((0, 2, 5),)):
                a, b = module_shards(ours, offsets), module_shards(theirs, offsets)
                counted += len(b)
                differences += [
                    (mode, x[0], y[0]) for x, y in zip(a, b, strict=True) if x[0] != y[0]
                ]
                differences += [
                    (mode, x[0], "data")
                    for x, y in zip(a, b, strict=True)
                    if isinstance(x[1], torch.Tensor) and not torch.equal(x[1], y[1])
                ]
        shards = {fields["key"]: fields for fields, _ in module_shards(ours, ())}
        coordinates = (groups.tp.rank(), groups.cp.rank())
    return {
        "differences": differences,
        "counted": counted,
        "shards": shards,
        "coordinates": coordinates,
    }


@pytest.mark.parametrize(("world_size", "tp"), [(1, 1), (4, 2)], ids=["tp1-cp1", "tp2-cp2"])
def test_module_is_sharded_as_megatron_cores(world_size: int, tp: int) -> None:
    """Key by key and shard by shard the same; and what it says is right in itself."""
    for result in run_distributed(compare_module_shards, world_size, tp):
        assert result["differences"] == []
        assert result["counted"] >= 2 * 3 * 15
        tp_rank, cp_rank = result["coordinates"]
        shards = result["shards"]
        sections = dict(zip(IN_PROJ_NAMES, IN_PROJ, strict=True))
        assert {k for k in shards if "in_proj.weight" in k} == {
            f"layer.in_proj.weight.{name}" for name in sections
        }
        for name, width in sections.items():
            shard = shards[f"layer.in_proj.weight.{name}"]
            assert shard["global_shape"] == (width, 32)
            assert shard["global_offset"] == (tp_rank * width // tp, 0)
            assert shard["local_shape"] == (width // tp, 32)
            assert shard["replica_id"] == (0, 0, cp_rank), "one writer: the first of the CP ranks"
            assert shard["dtype"] == torch.bfloat16
        for name in FP32_NAMES:
            shard = shards[f"layer.{name}"]
            assert shard["dtype"] == torch.float32
            assert shard["global_shape"] == (VALUE_HEADS,)
            assert shard["global_offset"] == (tp_rank * VALUE_HEADS // tp,)
            assert shard["replica_id"] == (0, 0, cp_rank)
        assert shards["layer.out_norm.weight"]["replica_id"] == (0, tp_rank, cp_rank)
        assert shards["layer.out_proj.weight"]["global_offset"] == (0, tp_rank * V // tp)


# --- whole models, by files ---------------------------------------------------------------------


def save_all(root: Path) -> None:
    """TP 2 and CP 2, chunkwise: parameters alone, with optimizer state, Megatron-Core's own."""
    from megatron.linear_cp.testing.checkpoints import save_checkpoint

    with cpu_cuda():
        make_groups(2)
        model = make_model("chunkwise")
        fill(model)
        save_checkpoint(root / "ours", model)
        trained = make_trained("chunkwise")
        trained.fill()
        save_checkpoint(root / "trained", trained.model, trained.optimizer, COMMON)
        model = make_upstream_model()
        fill(model)
        save_checkpoint(root / "upstream", model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    run_distributed(save_all, 4, root)
    return root


def load_all(root: Path, settings: list[tuple[int, str]]) -> dict[str, Any]:
    """What every checkpoint gives under other groups and modes: names of wrong tensors."""
    from megatron.linear_cp.testing.checkpoints import load_checkpoint

    wrong: dict[str, Any] = {}
    with cpu_cuda():
        for tp, mode in settings:
            make_groups(tp)
            for name, model in (
                ("ours", make_model(mode)),
                ("upstream", make_model(mode)),
                ("ours", make_upstream_model()),
            ):
                zero(model)
                load_checkpoint(root / name, model)
                reader = type(model.decoder.layers[0].self_attention).__module__.split(".")[1]
                wrong[f"TP {tp} {mode}: {name} into {reader}"] = wrong_tensors(model)
            trained = make_trained(mode)
            trained.spoil()
            common = load_checkpoint(root / "trained", trained.model, trained.optimizer)
            wrong[f"TP {tp} {mode}: trained"] = trained.wrong()
            wrong[f"TP {tp} {mode}: common"] = [] if common == COMMON else [str(common)]
            del trained, model
    return wrong


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [(1, [(1, "headwise")]), (8, [(2, "headwise"), (4, "all_gather")])],
    ids=["tp1-cp1", "tp2-cp4-and-tp4-cp2"],
)
def test_any_groups_and_mode_load_it(
    saved: Path, world_size: int, settings: list[tuple[int, str]]
) -> None:
    """Saved at TP 2 CP 2 chunkwise, by us and by Megatron-Core; read bitwise, each by the other.

    Moments, main parameters and the step of the optimizer too.
    """
    for rank, wrong in enumerate(run_distributed(load_all, world_size, saved, settings)):
        assert len(wrong) == 5 * len(settings)
        assert not {what: names for what, names in wrong.items() if names}, f"rank {rank}"


def read_files(root: Path) -> dict[str, Any]:
    """The whole tensors of a checkpoint by their keys, as the files hold them."""
    from megatron.core import dist_checkpointing

    with cpu_cuda():
        states = {
            name: dist_checkpointing.load_plain_tensors(str(root / name))
            for name in ("ours", "trained", "upstream")
        }
    return {
        name: {key: x for key, x in state.items() if isinstance(x, torch.Tensor)}
        for name, state in states.items()
    }


def stored_tensors() -> dict[str, torch.Tensor]:
    """What the files must hold: whole sections, under Transformer Engine's names."""
    found: dict[str, torch.Tensor] = {}

    def add(name: str, key: str, shape: Sequence[int]) -> None:
        found[key] = whole(name, shape).to(dtype_of(name))

    def add_sections(name: str, key: str, shape: Sequence[int], sections: list[int]) -> None:
        parts = whole(name, shape).to(torch.bfloat16).split(sections)
        found.update({f"{key}.{n}": x for n, x in zip(IN_PROJ_NAMES, parts, strict=False)})

    for i in range(4):
        layer = f"decoder.layers.{i}."
        attention = f"{layer}self_attention."
        if i < 3:
            add(f"{layer}input_layernorm.weight", f"{attention}in_proj.layer_norm_weight", [32])
            name = f"{attention}in_proj.weight"
            add_sections(name, name, [sum(IN_PROJ), 32], IN_PROJ)
            name = f"{attention}conv1d.weight"
            add_sections(name, name, [sum(CONV), 1, 4], CONV)
            shapes = {"A_log": [16], "dt_bias": [16], "out_norm.weight": [4]}
            shapes |= {"out_proj.weight": [32, V]}
        else:
            add(f"{layer}input_layernorm.weight", f"{attention}linear_qkv.layer_norm_weight", [32])
            shapes = {"linear_qkv.weight": [128, 32], "linear_proj.weight": [32, 64]}
            shapes |= {"q_layernorm.weight": [8], "k_layernorm.weight": [8]}
        for name, shape in shapes.items():
            add(attention + name, attention + name, shape)
        add(f"{layer}pre_mlp_layernorm.weight", f"{layer}mlp.linear_fc1.layer_norm_weight", [32])
        for name, shape in {"linear_fc1": [2 * FFN, 32], "linear_fc2": [32, FFN]}.items():
            add(f"{layer}mlp.{name}.weight", f"{layer}mlp.{name}.weight", shape)
    for name, shape in {
        "embedding.word_embeddings.weight": [VOCABULARY, 32],
        "decoder.final_layernorm.weight": [32],
        "output_layer.weight": [VOCABULARY, 32],
    }.items():
        add(name, name, shape)
    return found


def test_files_hold_whole_sections(saved: Path) -> None:
    """Each file's tensors by key, dtype and bits: q, k, v, gate, beta and alpha each by itself."""
    [files] = run_distributed(read_files, 1, saved)
    wanted = stored_tensors()
    for name in ("ours", "upstream"):
        assert files[name].keys() == wanted.keys(), name
        for key, tensor in wanted.items():
            assert files[name][key].dtype == tensor.dtype, (name, key)
            assert torch.equal(files[name][key], tensor), (name, key)
    # The optimizer cuts its state the same way.
    for kind, stored in (
        ("exp_avg", "exp_avg"),
        ("exp_avg_sq", "exp_avg_sq"),
        ("main", "fp32_param"),
    ):
        name = "decoder.layers.1.self_attention.in_proj.weight"
        parts = whole(f"{name} {kind}", [sum(IN_PROJ), 32]).split(IN_PROJ)
        for section, part in zip(IN_PROJ_NAMES, parts, strict=True):
            key = f"optimizer.state.{stored}.{name}.{section}"
            assert torch.equal(files["trained"][key], part), key


# --- damage -------------------------------------------------------------------------------------


def damage(root: Path) -> dict[str, Path]:
    """Copies of the checkpoint with one shard file missing, cut short, or with one bit turned."""
    copies = {kind: root / f"damaged_{kind}" for kind in ("missing", "short", "flipped")}
    for folder in copies.values():
        shutil.copytree(root / "trained", folder)
    shards = {kind: sorted(folder.glob("*.distcp")) for kind, folder in copies.items()}
    # The last file: by then others have been read.
    shards["missing"][-1].unlink()
    content = shards["short"][-1].read_bytes()
    shards["short"][-1].write_bytes(content[: len(content) // 2])
    # One bit of a value that nothing but a hash can tell from a right one.
    value = whole("output_layer.weight", [VOCABULARY, 32]).bfloat16()[VOCABULARY // 2 :]
    raw = value.contiguous().view(torch.uint8).numpy().tobytes()
    [file] = [f for f in shards["flipped"] if raw in f.read_bytes()]
    damaged = bytearray(file.read_bytes())
    damaged[damaged.index(raw)] ^= 1
    file.write_bytes(bytes(damaged))
    return copies


def load_damaged(copies: dict[str, Path], good: Path) -> dict[str, Any]:
    """What each load says, whether anything changed, and whether a good one still loads."""
    from megatron.linear_cp.testing.checkpoints import load_checkpoint

    said: dict[str, Any] = {}
    with cpu_cuda():
        make_groups(2)
        trained = make_trained("headwise")
        trained.spoil()
        loads = [(kind, folder, True) for kind, folder in copies.items()]
        loads += [(f"{kind}, unchecked", copies[kind], False) for kind in ("missing", "short")]
        for what, folder, verify in loads:
            try:
                load_checkpoint(folder, trained.model, trained.optimizer, verify)
            except Exception as error:
                said[what] = (type(error).__name__, str(error), trained.spoiled())
        load_checkpoint(good, trained.model, trained.optimizer, verify_integrity=True)
        said["good"] = trained.wrong()
    return said


def test_damage_is_refused_on_every_rank(saved: Path) -> None:
    """A missing, short or altered shard file: an error everywhere, and no tensor changed."""
    copies = damage(saved)
    for rank, said in enumerate(run_distributed(load_damaged, 4, copies, saved / "trained")):
        assert said.pop("good") == []
        assert set(said) == {*(f"{kind}, unchecked" for kind in ("missing", "short")), *copies}
        for what, (kind, message, unchanged) in said.items():
            assert kind == "CheckpointingException", what
            assert unchanged, f"{what}: rank {rank} is half loaded"
            assert str(copies[what.split(",")[0]]) in message, f"{what}: {message}"
            # PyTorch does not say which file ended too soon.
            if what != "short, unchecked":
                assert ".distcp" in message, f"{what}: {message}"
