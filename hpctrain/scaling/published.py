"""Published measurements of the same model, shown beside one's own; never calibrated on."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib import resources
from typing import Any, ClassVar

from hpctrain.scaling.analysis import Report


@dataclass(frozen=True, slots=True)
class Published:
    """A row of ``published.csv``; empty text where the source does not state it.

    Attributes:
        source: publication.
        model: as the source names it.
        gpu, gpus: devices.
        layout: tensor, pipeline and data-parallel degree.
        batch: samples a step.
        step_seconds: of a step.
        tflops: achieved a device, in the source's convention.
        share: of peak in percent, as stated.
        convention: which FLOPs the source counts.
    """

    HEADERS: ClassVar[tuple[str, ...]] = (
        "source", "model", "device", "devices", "layout", "batch", "step", "TFLOP/s a device",
        "of peak", "counts",
    )  # fmt: skip

    source: str
    model: str
    gpu: str
    gpus: str
    layout: str
    batch: str
    step_seconds: str
    tflops: str
    share: str
    convention: str

    def cells(self) -> tuple[str, ...]:
        return (
            self.source, self.model, self.gpu, self.gpus, self.layout, self.batch,
            f"{self.step_seconds} s" if self.step_seconds else "-", self.tflops or "-",
            f"{self.share} %" if self.share else "-", self.convention,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def published(report: Report) -> list[Published]:
    """Rows whose model has the layers, width and heads of one of the report's."""
    shapes = set()
    for row in report.rows:
        spec = row.point.spec
        if spec is not None and spec.model.module is None:
            model = spec.model
            shapes.add((str(model.layers), str(model.hidden), str(model.heads)))
    if not shapes:
        return []
    text = resources.files("hpctrain.scaling").joinpath("published.csv").read_text("utf-8")
    return [
        Published(**{name: line[name] for name in Published.__slots__})
        for line in csv.DictReader(text.splitlines())
        if (line["layers"], line["hidden"], line["heads"]) in shapes
    ]
