"""Resolves a model's name to a folder."""

import os
import re
from pathlib import Path

from dsv4.errors import CheckpointError

BUILTIN_MODELS = Path(__file__).parent.parent / "models"


def model_folder(name: str, *others: str) -> Path:
    """An embedded model or a path; `./tiny` is always a path. `others`: names for the error."""
    embedded = BUILTIN_MODELS / name
    if name.isidentifier() and embedded.is_dir():
        return embedded
    folder = Path(name).expanduser()
    try:
        is_folder = folder.is_dir()
        if is_folder:
            os.listdir(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
    if not is_folder:
        names = [*others, *sorted(p.name for p in BUILTIN_MODELS.iterdir() if p.is_dir())]
        if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
            local = name.split("/")[1]
            raise CheckpointError(
                f"{name!r} is no folder here. If it is a name on the Hugging Face Hub, download it "
                f"first (pip install huggingface_hub; hf download {name} --local-dir {local}), "
                f"then give the folder: {local}; or give one of: {', '.join(names)}"
            )
        raise CheckpointError(
            f"{name!r} is neither a folder nor an embedded model; expected a folder with "
            f"config.json and safetensors files, or one of: {', '.join(names)}"
        )
    return folder
