"""Hugging Face folders: safetensors read and written part by part, in both name styles, sharded or not.

load(model, folder)          fill a model, each rank its own part
save(model, folder)          write one that `from_pretrained` opens
pack_experts(model, folder)  keep experts as the folder's own bytes (DeepSeek's FP8 blocks, gpt-oss's MXFP4)
Reader, write                the same without a model: tensors of a folder, and a folder of tensors
"""

from moe_runtime.checkpoint.hf.folder import Folder
from moe_runtime.checkpoint.hf.load import LoadReport, load, pack_experts
from moe_runtime.checkpoint.hf.names import STYLES, Names, Piece, Style, attach_names, names_of
from moe_runtime.checkpoint.hf.reader import Box, Reader, Source
from moe_runtime.checkpoint.hf.run import RunCheckpoint
from moe_runtime.checkpoint.hf.save import SaveOptions, save, write

__all__ = [
    "STYLES",
    "Box",
    "Folder",
    "LoadReport",
    "Names",
    "Piece",
    "Reader",
    "RunCheckpoint",
    "SaveOptions",
    "Source",
    "Style",
    "attach_names",
    "load",
    "names_of",
    "pack_experts",
    "save",
    "write",
]
