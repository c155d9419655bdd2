"""A stand-in for the packages of experiment trackers."""

import types
from collections.abc import Mapping
from typing import Any


class Service:
    """A stand-in for a tracker's own package, as far as kleash calls it."""

    def __init__(self) -> None:
        self.began: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.logged: list[tuple[Any, Mapping[str, float]]] = []
        self.finished = 0

    def as_module(self, name: str) -> types.ModuleType:
        module = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(name=name)  # type: ignore[assignment]
        members: dict[str, Any] = {
            "init": lambda **more: self.init(**more),
            "log": lambda *values, **more: self.log(*values, **more),
            "finish": lambda: self.finish(),
            "set_experiment": lambda name: self.began.update(project=name),
            "start_run": lambda **more: self.began.update(more),
            "log_params": self.settings.update,
            "log_metrics": lambda values, step: self.logged.append((step, values)),
            "end_run": self.finish,
        }
        for member, value in members.items():
            setattr(module, member, value)
        return module

    def init(self, **more: Any) -> "Service":
        self.settings.update(more.pop("config"))
        self.began.update(more)
        return self

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1
