"""Adapters exchanged with PEFT, checked by what both compute: Hugging Face's model with PEFT's layers, and ours."""

# E experts   r rank   F out features   D in features

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import moe_runtime as mr
from moe_runtime.checkpoint import hf as folders
from moe_runtime.core.errors import CheckpointError
from moe_runtime.integrations import transformers as hf
from moe_runtime.integrations.peft.packing import Factors, from_fused, from_pieces, to_fused
from moe_runtime.nn.adapters import adapter_parameters

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that it imports, at import
    import peft

IDS = torch.arange(2 * 12).reshape(2, 12) * 7 % 64
TARGETS = ("gate_up", "down", "q_proj", "o_proj")
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 12, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 8},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 24},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 24, "head_dim": 8, "layer_types": ["full_attention"] * 2},
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random base of each architecture, whose experts differ enough to be told apart in the logits."""
    made = {}
    for name, fields in MODELS.items():
        model = hf.build(hf.load_config(model_type=name, fields={**COMMON, **fields}))
        hf.initialize(model, seed=0, device=torch.device("cpu"))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(8)
        made[name] = folders.save(model, tmp_path_factory.mktemp("bases") / name)
    return made


def ours(base: Path, recipe: Any = None) -> Any:
    with mr.quantized_model_init(
        enabled=recipe is not None, recipe=recipe, omit_columnwise_primary_weight_storage=bool(recipe)
    ):
        model = hf.build(hf.load_config(config_file=str(base / "config.json")), dtype=torch.float32)
    folders.load(model, base)
    return model.eval()


def theirs(base: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def adapted(base: Path, **options: Any) -> Any:
    """With updates large enough to change every logit."""
    model = ours(base)
    mr.add_lora(model, mr.LoRAConfig(3, 6.0, **{"target_modules": TARGETS, **options}))
    _randomize(model)
    return model


def _randomize(model: Any) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model):
            if name.endswith(("b.weight", "lora_B.default.weight")):
                parameter.normal_(0, 0.5)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=IDS).logits


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def in_peft(base: Path, folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(theirs(base), str(folder)).eval()


FOLDERS = [
    ("qwen3_moe", "fused"),
    ("gpt_oss", "fused"),
    ("qwen3_moe", "per_expert"),
    pytest.param("mixtral", "fused", marks=pytest.mark.slow),
    pytest.param("mixtral", "per_expert", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "style"), FOLDERS)
def test_our_folder_opens_in_peft(name: str, style: Any, bases: dict[str, Path], tmp_path: Path) -> None:
    model = adapted(bases[name])
    expected = logits(model)
    assert difference(expected, logits(ours(bases[name]))) > 1e-2
    mr.export_peft(model, tmp_path / "adapter", style=style)
    assert difference(logits(in_peft(bases[name], tmp_path / "adapter")), expected) < 1e-5
    again = ours(bases[name])
    config = mr.import_peft(again, tmp_path / "adapter")
    assert (config.rank, config.alpha) == (3, 6.0)
    assert torch.equal(logits(again), expected)


@pytest.mark.parametrize(("targets", "rslora"), [(("gate_up",), False), (("down",), True), (("q_proj",), True)])
def test_some_layers_alone(targets: tuple[str, ...], rslora: bool, bases: dict[str, Path], tmp_path: Path) -> None:
    base = bases["qwen3_moe"]
    model = adapted(base, target_modules=targets, use_rslora=rslora)
    mr.export_peft(model, tmp_path / "adapter")
    assert difference(logits(in_peft(base, tmp_path / "adapter")), logits(model)) < 1e-5
    again = ours(base)
    mr.import_peft(again, tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("name", MODELS)
def test_pefts_folder_opens_here(name: str, bases: dict[str, Path], tmp_path: Path) -> None:
    options = peft.LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        init_lora_weights=False,
    )
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(theirs(bases[name]), options).eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "lora_B" in parameter_name:
                    parameter.normal_(0, 0.5)
        model.save_pretrained(str(tmp_path / "adapter"))
    loaded = ours(bases[name])
    mr.import_peft(loaded, tmp_path / "adapter")
    assert difference(logits(loaded), logits(ours(bases[name]))) > 1e-2
    assert difference(logits(loaded), logits(model)) < 1e-5


def test_a_folder_of_separate_projections_adds_up_their_ranks(bases: dict[str, Path], tmp_path: Path) -> None:
    """As transformers 4 trained them: gate and up have an A of their own, and some experts have none at all."""
    base = bases["qwen3_moe"]
    torch.manual_seed(3)
    tensors, deltas = {}, {}
    for layer in range(2):
        for expert in (0, 2, 10):
            for projection, (rows, cols) in {"gate_proj": (24, 32), "up_proj": (24, 32), "down_proj": (32, 24)}.items():
                if (layer, expert, projection) == (0, 2, "gate_proj"):
                    continue  # the up projection alone
                key = f"model.layers.{layer}.mlp.experts.{expert}.{projection}"
                a, b = torch.randn(2, cols) / 4, torch.randn(rows, 2) / 4
                tensors |= {f"base_model.model.{key}.lora_A.weight": a, f"base_model.model.{key}.lora_B.weight": b}
                deltas[key] = 4 / math.sqrt(2) * b @ a
    folder = tmp_path / "adapter"
    folder.mkdir()
    from safetensors.torch import save_file

    save_file(tensors, folder / "adapter_model.safetensors")
    text = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_rslora": True, "target_modules": ["up_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(text))
    model = ours(base)
    config = mr.import_peft(model, folder)
    assert config.rank == 4 and config.scale == pytest.approx(4 / math.sqrt(2))
    expected = theirs(base)
    with torch.no_grad():
        for key, delta in deltas.items():
            around, _, rest = key.partition(".experts.")
            expert, projection = rest.split(".")
            experts = expected.get_submodule(f"{around}.experts")
            if projection == "down_proj":
                experts.down_proj[int(expert)] += delta
            else:
                first = 0 if projection == "gate_proj" else 24
                experts.gate_up_proj[int(expert), first : first + 24] += delta
    assert difference(logits(model), logits(expected)) < 1e-5


def test_experts_are_slow_in_a_and_fast_in_b() -> None:
    factors = from_fused(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([[10.0, 20.0, 30.0, 40.0]]), 2)
    assert (factors.b @ factors.a).flatten().tolist() == [70, 220]
    a, b = to_fused(factors)
    assert a.flatten().tolist() == [1, 2, 3, 4] and b.flatten().tolist() == [10, 20, 30, 40]


def test_an_update_of_up_alone_is_in_the_second_half() -> None:
    pieces = [
        folders.Piece(key=f"{e}.{part}", expert=e, rows=rows)
        for e in range(2)
        for part, rows in (("gate", (0, 2)), ("up", (2, 4)))
    ]
    given = {"1.up": (torch.ones(1, 3), torch.ones(2, 1))}
    found = from_pieces(given, pieces, (2, 4, 3))
    assert isinstance(found, Factors) and found.rank == 1
    delta = found.b @ found.a
    assert not delta[0].any() and not delta[1, :2].any() and bool((delta[1, 2:] == 1).all())


def test_shared_factors_are_written_for_each_expert(bases: dict[str, Path], tmp_path: Path) -> None:
    base = bases["qwen3_moe"]
    model = adapted(base, target_modules=("gate_up", "down"), share_outer=True)
    mr.export_peft(model, tmp_path / "adapter")
    assert difference(logits(in_peft(base, tmp_path / "adapter")), logits(model)) < 1e-5
    again = adapted(base, target_modules=("gate_up", "down"), share_outer=True)
    mr.import_peft(again, tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("recipe", [None, "mxfp8", "nvfp4"])
def test_merged_and_unmerged(recipe: str | None, bases: dict[str, Path], tmp_path: Path) -> None:
    known = {
        None: None,
        "mxfp8": mr.recipes.MXFP8BlockScaling(backward_override="dequantized"),
        "nvfp4": mr.recipes.NVFP4BlockScaling(backward_override="dequantized"),
    }
    base = wide_base(tmp_path)
    model = ours(base, known[recipe])
    mr.add_lora(model, mr.LoRAConfig(3, 6.0, target_modules=TARGETS))
    _randomize(model)
    before, plain = logits(model), {name: p.detach().clone() for name, p in model.named_parameters()}
    report = mr.merge_lora(model)
    after = logits(model)
    assert len(report.layers) == 8
    if recipe is None:
        assert difference(after, before) < 1e-5
    experts = [layer for layer in report.layers if "experts" in layer.name]
    assert all(layer.quantized == (recipe is not None) for layer in experts)
    largest = max(layer.of_weight for layer in experts)
    low, high = {None: (0, 1e-7), "mxfp8": (0.01, 0.04), "nvfp4": (0.05, 0.15)}[recipe]
    assert low <= largest <= high
    if recipe is None:
        merged = folders.save(model, tmp_path / "merged", options=folders.SaveOptions(drop=("lora",)))
        assert difference(logits(theirs(merged)), before) < 1e-5
    with pytest.raises(RuntimeError, match="merged, and would not learn"):
        model.train()(input_ids=IDS)
    model.eval()
    with pytest.raises(ValueError, match="merged already"):
        mr.merge_lora(model)
    mr.unmerge_lora(model)
    assert torch.equal(logits(model), before)
    for name, parameter in model.named_parameters():
        own = parameter.dequantize() if recipe and hasattr(parameter, "dequantize") else parameter
        kept = plain[name].dequantize() if recipe and hasattr(plain[name], "dequantize") else plain[name]
        assert torch.equal(own, kept), name
    with pytest.raises(ValueError, match="not merged"):
        mr.unmerge_lora(model)
    mr.merge_lora(model, keep=False)
    with pytest.raises(ValueError, match="were not kept"):
        mr.unmerge_lora(model)


def wide_base(folder: Path) -> Path:
    """Of sizes that every format can store."""
    fields = {**COMMON, **MODELS["qwen3_moe"], "moe_intermediate_size": 32, "num_experts": 4}
    model = hf.build(hf.load_config(model_type="qwen3_moe", fields=fields))
    hf.initialize(model, seed=0, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return folders.save(model, folder / "base")


def test_what_does_not_fit_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    model = adapted(bases["qwen3_moe"])
    folder = mr.export_peft(model, tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="exists already and is not empty"):
        mr.export_peft(model, folder)
    with pytest.raises(CheckpointError, match="belongs to another base"):
        mr.import_peft(ours(bases["mixtral"]), folder)
    other = adapted(bases["qwen3_moe"], target_modules=("gate_up", "down"))
    with pytest.raises(CheckpointError, match="belong to another base or configuration"):
        mr.import_peft(other, folder)
    scaled = ours(bases["qwen3_moe"])
    mr.add_lora(scaled, mr.LoRAConfig(3, 7.0, target_modules=TARGETS))
    with pytest.raises(CheckpointError, match=r"expected rank 3 and scale 2\.33333, got rank 3 and scale 2"):
        mr.import_peft(scaled, folder)
    with pytest.raises(ValueError, match="has adapters already"):
        mr.add_lora(model, mr.LoRAConfig(2, 2.0))
    with pytest.raises(CheckpointError, match="expected an adapter folder"):
        mr.import_peft(ours(bases["qwen3_moe"]), tmp_path)
    text = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**text, "use_dora": True}))
    with pytest.raises(CheckpointError, match="use_dora must be False, got True"):
        mr.import_peft(ours(bases["qwen3_moe"]), folder)
    for wrong, near in (("gate_upp", "gate_up"), ("q_prj", "q_proj"), ("dwn", "down")):
        with pytest.raises(ValueError, match=f"got '{wrong}'; did you mean '{near}'"):
            mr.add_lora(ours(bases["qwen3_moe"]), mr.LoRAConfig(2, 2.0, target_modules=(wrong,)))
    with pytest.raises(ValueError, match=r"rank must be at most min\(in, out\) = 16 of .*k_proj, got 17"):
        mr.add_lora(ours(bases["qwen3_moe"]), mr.LoRAConfig(17, 2.0, target_modules=("down", "k_proj")))
    model.get_parameter("model.norm.weight").requires_grad_(True)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is no adapter and requires a gradient"):
        mr.lora_state_dict(model)
