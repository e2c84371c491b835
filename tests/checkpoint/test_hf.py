"""Folders that do not fit are refused by name, experts go where their ids say, and little is held meanwhile."""

import ctypes
import gc
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import config_of, folder_of, reference
from torch import Tensor, nn

from moe_runtime.checkpoint import hf as folders
from moe_runtime.checkpoint.hf.reader import blocks
from moe_runtime.checkpoint.hf.writer import Spec, plan_shards
from moe_runtime.core.errors import CheckpointError
from moe_runtime.integrations import transformers as hf

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.1.mlp.experts.4.up_proj.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(reference("qwen3_moe"), tmp_path_factory.mktemp("hf") / "theirs")


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "theirs"))


def _change(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _refused(folder: Path, sentence: str, **options: Any) -> None:
    model = hf.build(config_of("qwen3_moe"))
    with pytest.raises(CheckpointError, match=sentence) as caught:
        folders.load(model, folder, **options)
    assert "\n" not in str(caught.value)


def test_missing_keys_are_named(folder: Path) -> None:
    _change(folder, lambda tensors: tensors.pop(EXPERT))
    _refused(folder, rf"lacks {EXPERT}, which the model has")


def test_missing_keys_of_the_fused_style_are_named(tmp_path: Path) -> None:
    folder = folder_of(reference("qwen3_moe"), tmp_path / "fused", fused=True)
    _change(folder, lambda tensors: [tensors.pop(key) for key in list(tensors) if "down_proj" in key])
    _refused(folder, r"lacks model\.layers\.0\.mlp\.experts\.\S*down_proj\S*, model\.layers\.1\.mlp\.experts\.")


def test_unmatched_keys_are_named_and_counted(folder: Path) -> None:
    extra = {f"model.layers.7.mlp.experts.{e}.up_proj.weight": torch.zeros(20, 32) for e in range(5)}
    _change(folder, lambda tensors: tensors.update(extra))
    _refused(folder, r"holds model\.layers\.7\.mlp\.experts\.0\.\S+, \S+, \S+ and 2 more, which belong to no tensor")
    folders.load(hf.build(config_of("qwen3_moe")), folder, ignore=(r"layers\.7\.",))


def test_more_experts_than_the_model_has_are_refused(folder: Path) -> None:
    _change(folder, lambda t: t.update({EXPERT.replace(".4.", ".6."): torch.zeros(20, 32)}))
    _refused(folder, r"holds model\.layers\.1\.mlp\.experts\.6\.up_proj\.weight, which belongs to no tensor")


def test_a_tensor_in_both_styles_is_refused(folder: Path) -> None:
    key = "model.layers.1.mlp.experts.down_proj"
    _change(folder, lambda tensors: tensors.update({key: torch.zeros(6, 32, 20)}))
    _refused(folder, rf"twice: as model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight and as {key}")


def test_a_key_in_two_files_is_refused(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    save_file({EXPERT: torch.zeros(20, 32)}, folder / "model-00002-of-00002.safetensors")
    _refused(folder, rf"holds the tensor {EXPERT} twice, in model-00001-\S+ and in model-00002-")


def test_wrong_shapes_are_refused(folder: Path) -> None:
    _change(folder, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].T.contiguous()}))
    _refused(folder, rf"{EXPERT} must have shape \(20, 32\), got \(32, 20\)")


def test_nan_is_refused_by_name(folder: Path) -> None:
    _change(folder, lambda tensors: tensors[EXPERT][19].fill_(float("nan")))
    _refused(folder, r"model\.layers\.1\.mlp\.experts\.experts\.gate_up\.weight holds NaN")


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ({"weight_map": {EXPERT: "none.safetensors"}}, r"names none\.safetensors, which does not exist"),
        ({"weight_map": {"a.weight": WEIGHTS}}, rf"places a\.weight in {WEIGHTS}, which does not hold it"),
        ({"weight_map": {EXPERT: "../theirs/model.safetensors"}}, "may name only files beside it, got"),
        ({"weights": {}}, "is no index: expected a JSON object with a weight_map"),
        ([], "is no index"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(folder: Path, index: object, sentence: str) -> None:
    (folder / INDEX).write_text(json.dumps(index))
    _refused(folder, sentence)


def test_folders_without_weights_are_refused(tmp_path: Path) -> None:
    _refused(tmp_path / "none", "expected a Hugging Face folder, got .*none, which is no folder")
    _refused(tmp_path, r"holds no weights: expected model\.safetensors, or model\.safetensors\.index\.json")
    (tmp_path / WEIGHTS).write_bytes(b"\xff" * 100)
    _refused(tmp_path, r"model\.safetensors is no whole safetensors file")


def test_a_model_without_a_map_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="Linear does not know its Hugging Face names"):
        folders.load(nn.Linear(2, 2), folder)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("discrete", [False, True])
def test_ids_sort_as_numbers(fused: bool, discrete: bool, tmp_path: Path) -> None:
    """Case G2: in the order of strings expert 10 would come third."""
    theirs = reference("qwen3_moe", num_experts=12)
    with torch.no_grad():
        for layer in theirs.model.layers:
            for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                weight.copy_(torch.arange(12.0)[:, None, None].expand_as(weight))
    source = folder_of(theirs, tmp_path / "theirs", fused=fused, shard="30KB")
    model = hf.build(config_of("qwen3_moe", num_experts=12), single_grouped_weight=not discrete)
    folders.load(model, source)
    written = folders.save(model, tmp_path / "ours", options=folders.SaveOptions(max_shard_bytes=20_000))
    experts: Any = model.get_submodule("model.layers.1.mlp.experts")
    for linear in (experts.experts.gate_up, experts.experts.down):
        values = linear.stacked_weight().detach()
        assert torch.equal(values.amin((1, 2)), torch.arange(12.0)) and torch.equal(
            values.amax((1, 2)), torch.arange(12.0)
        )
    with folders.Folder(written) as held:
        for expert in range(12):
            value = held.read(f"model.layers.0.mlp.experts.{expert}.gate_proj.weight", ((0, 20), (0, 32)))
            assert (value == expert).all()


def test_a_poisoned_model_holds_only_what_the_folder_does(folder: Path) -> None:
    """Case G3, and the storage that optimizers and wrappers know stays the same."""
    model = hf.build(config_of("qwen3_moe"), dtype=torch.bfloat16)
    hf.initialize(model, seed=0, device=torch.device("cpu"))
    held = {name: (parameter, parameter.data_ptr()) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    folders.load(model, folder)
    tensors = load_file(folder / WEIGHTS)
    for name, parameter in model.named_parameters():
        assert not parameter.isnan().any(), name
        assert held[name] == (parameter, parameter.data_ptr())
        assert name not in tensors or torch.equal(parameter, tensors[name].bfloat16()), name
    down = torch.stack([tensors[f"model.layers.1.mlp.experts.{e}.down_proj.weight"] for e in range(6)])
    experts: Any = model.get_submodule("model.layers.1.mlp.experts")
    assert torch.equal(experts.experts.down.weight.plain(), down.bfloat16())


def test_a_refused_folder_leaves_no_part_behind(folder: Path, tmp_path: Path) -> None:
    model = hf.build(config_of("qwen3_moe"))
    folders.load(model, folder)
    with pytest.raises(CheckpointError, match="exists already and is not empty"):
        folders.save(model, folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"could not be written: .*Not a directory"):
        folders.save(model, tmp_path / "file" / "out")
    (tmp_path / "empty").mkdir()
    assert folders.save(model, tmp_path / "empty") == tmp_path / "empty"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "theirs"]


def test_files_hold_at_most_what_was_asked_for(written: Path, tmp_path: Path) -> None:
    model = hf.build(config_of("qwen3_moe"))
    folders.load(model, written)
    out = folders.save(model, tmp_path / "ours", options=folders.SaveOptions(max_shard_bytes=10_000))
    index = json.loads((out / INDEX).read_text())
    names = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(names) > 5 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    total = 0
    for name in names:
        with safe_open(out / name, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            sizes = {key: file.get_tensor(key).numel() * 4 for key in file.keys()}  # noqa: SIM118
        assert sum(sizes.values()) <= 10_000 or len(sizes) == 1
        assert {key for key, file_name in index["weight_map"].items() if file_name == name} == sizes.keys()
        total += sum(sizes.values())
    assert index["metadata"]["total_size"] == total


def test_shards_are_planned_by_writer_and_size() -> None:
    specs = [
        Spec(key=str(i), dtype=torch.float32, shape=(n,), writer=w)
        for i, (n, w) in enumerate([(2, 0), (9, 1), (3, 0), (1, 1)])
    ]
    planned = [[spec.key for spec in shard.specs] for shard in plan_shards(specs, 16)]
    assert planned == [["0"], ["2"], ["1"], ["3"]]
    assert [shard.file for shard in plan_shards(specs[:1], 16)] == [WEIGHTS]


@pytest.mark.parametrize("box", [(), ((3, 10),), ((0, 5), (2, 9)), ((1, 3), (0, 3), (4, 6)), ((0, 0), (0, 4))])
def test_blocks_cover_a_box_once(box: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_runtime.checkpoint.hf import reader

    monkeypatch.setattr(reader, "_BLOCK_BYTES", 10)
    counts = torch.zeros([stop for _, stop in box], dtype=torch.int)
    for part in blocks(box, 4):
        index = tuple(slice(start, stop) for start, stop in part)
        assert counts[index].numel() * 4 <= max(10, 4 * (box[-1][1] - box[-1][0] if box else 1))
        counts[index] += 1
    inside = tuple(slice(start, stop) for start, stop in box)
    assert (counts[inside] == 1).all() and counts.sum() == counts[inside].numel()


def _anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class _Peak:
    """The most anonymous memory of this process while it is open, above what it was."""

    def __enter__(self) -> "_Peak":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that the heap keeps would hide what is held next
        self.start = self.most = _anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.most = max(self.most, _anonymous_bytes())

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return self.most - self.start


def test_beside_the_model_less_than_half_a_tensor_more_is_held(tmp_path: Path) -> None:
    fields = {"vocab_size": 50_000, "hidden_size": 256, "num_hidden_layers": 1, "num_experts": 32}
    fields |= {"moe_intermediate_size": 512, "num_experts_per_tok": 2}
    largest = 50_000 * 256 * 4
    theirs = reference("qwen3_moe", **fields)
    source = folder_of(theirs, tmp_path / "theirs")
    del theirs
    model = hf.build(config_of("qwen3_moe", **fields))
    hf.initialize(model, seed=0, device=torch.device("cpu"))
    with _Peak() as peak:
        folders.load(model, source)
    assert peak.bytes < 1.5 * largest, f"{peak.bytes / largest:.2f} of the largest tensor"
    with _Peak() as peak:
        folders.save(model, tmp_path / "ours", options=folders.SaveOptions(dtype=torch.bfloat16))
    assert peak.bytes < 1.5 * largest, f"{peak.bytes / largest:.2f} of the largest tensor"
    del model
    with _Peak() as peak:
        hf.convert(source, tmp_path / "fused", options=folders.SaveOptions(style="fused"))
    assert peak.bytes < 1.5 * largest, f"{peak.bytes / largest:.2f} of the largest tensor"
