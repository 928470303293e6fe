"""Decides what each step runs: admission, chunks, pages, preemption, ends. Plain data; no tensors."""

from deepinfer.engine.scheduler.ending import EndRules
from deepinfer.engine.scheduler.job import Job, Phase
from deepinfer.engine.scheduler.limits import SchedulerLimits
from deepinfer.engine.scheduler.pictures import Pictures, PictureStatistics, VisionLimits
from deepinfer.engine.scheduler.scheduler import Scheduler
from deepinfer.engine.scheduler.statistics import Statistics

__all__ = [
    "EndRules",
    "Job",
    "Phase",
    "PictureStatistics",
    "Pictures",
    "Scheduler",
    "SchedulerLimits",
    "Statistics",
    "VisionLimits",
]
