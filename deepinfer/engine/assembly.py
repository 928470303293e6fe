"""Puts an engine's parts together: weights, caches, pages, scheduler, runner."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer.cache.budget import CacheSizes
from deepinfer.cache.disk import DiskTier
from deepinfer.cache.identity import cache_identity
from deepinfer.cache.manager import KVManager
from deepinfer.cache.storage import Caches
from deepinfer.cache.tiers import HostTier, Tier
from deepinfer.checkpoint.random import RandomCheckpoint
from deepinfer.checkpoint.reader import CONFIG_FILE, Checkpoint
from deepinfer.config.engine import EngineConfig
from deepinfer.config.envs import Environment
from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import CheckpointError, ConfigError
from deepinfer.engine.content import content_keys, image_spans
from deepinfer.engine.context import Context
from deepinfer.engine.device import select_device
from deepinfer.engine.model_runner import ModelRunner
from deepinfer.engine.profiling import platform_name
from deepinfer.engine.recorded import UNPACKED_KEYS, Recording
from deepinfer.engine.replay import ReplayPolicy
from deepinfer.engine.scheduler import EndRules, Pictures, Scheduler, SchedulerLimits, VisionLimits
from deepinfer.engine.stops import stop_strings_of
from deepinfer.model.drafter import Drafter
from deepinfer.model.experts import ExpertLoads, RoutedExperts, local_experts
from deepinfer.model.loading import Form, load_drafter, load_weights
from deepinfer.model.memory import HostTables
from deepinfer.model.model import InferenceModel
from deepinfer.model.recorder import SIZES, Recorder
from deepinfer.model.row_operators import RowOperators, row_operators
from deepinfer.ops.experts import most_rows
from deepinfer.ops.rows import torch as torch_rows
from deepinfer.parallel.member import Member
from deepinfer.parallel.sharing import sharing_model
from deepinfer.speculative.calibration import Calibration
from deepinfer.speculative.schedule import ScheduledDrafts
from deepinfer.speculative.times import RoundTimes, load_times
from deepinfer.text.engram_classes import check_engram_classes, engram_classes
from deepinfer.text.tokenizer import Tokenizer

USUAL_DRAFT = 5
"""The default of DEEPINFER_USE_NEXTN_DECODE, which asks for no more than a checkpoint's block."""


@dataclass(frozen=True)
class Parts:
    """What an engine runs with; each part owns its own state.

    pictures: None for a model that sees nothing. policy: None where all drafts are verified, or there are none.
    context: None where no other rank runs a part of this one's steps.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    runner: ModelRunner
    kv: KVManager
    scheduler: Scheduler
    expert_loads: ExpertLoads | None
    pictures: Pictures | None
    policy: ScheduledDrafts | None
    context: Context | None


def assemble(directory: Path, environment: Environment, settings: EngineConfig, member: Member | None = None) -> Parts:
    """Load the checkpoint in `directory`; CheckpointError or ConfigError if it or the settings will not do.

    `member`: this rank among others; None: it is alone.
    """
    device = select_device(environment.accelerator)
    checkpoint = _weights(directory, settings, device)
    config = checkpoint.config
    replay = ReplayPolicy.choose(environment, config)
    limits = _limits(environment, settings, config)
    tokenizer = Tokenizer.from_file(directory)
    classes = checked_classes(tokenizer, config, str(directory))
    if isinstance(checkpoint, Checkpoint):
        checkpoint.check()
    dtype = _dtype(settings, device)
    keep = settings.keep_quantized
    if keep is None:
        keep = device.type != "cpu" and dtype is torch.bfloat16
    operators = row_operators(config, device) if keep and not environment.batch_invariant else None
    form = Form(dtype, device, keep, settings.engram_tables == "host")
    loads: ExpertLoads | None
    if member is not None and member.collectives is not None:
        extra, interval = environment.extra_experts or 0, settings.rebalance_steps
        model, loads = sharing_model(checkpoint, classes, operators, form, member, extra, interval)
    else:
        model, loads = _whole_model(checkpoint, classes, operators, form, settings.count_experts)
    slots, verified = limits.max_num_seqs, limits.drafts + 1
    pages = _pages(CacheSizes(config, slots, settings.page_size, verified), settings, device)
    if member is not None and member.group is not None:  # which all have the pages that the first of them hands out
        pages = -member.group.most([-pages])[0]
    caches = Caches(config, pages, slots, settings.page_size, verified, device)
    drafter, calibration = None, None
    if limits.drafts:
        drafter = Drafter(config, load_drafter(checkpoint, dtype, device, keep), model.weights)
        calibration = Calibration.load(directory, config.dspark_block_size)
    # Behind a cached prefix compact replay computes KV from a shortened window, mode off from the whole prefix.
    identity = cache_identity(directory, caches.layout, settings.page_size, f"{dtype} {replay.mode} {keep}")
    kv = KVManager(pages, settings.page_size, identity, caches, _tiers(settings, identity))
    ends = EndRules(config.eos_token_id, config.max_position_embeddings, stop_strings_of(tokenizer))
    pictures = _pictures(config, settings, dtype)
    context = None
    if member is not None and member.group is not None:
        context = Context(model, caches, member.ranks, member.group, environment.batch_invariant)
    alone = member is None or member.collectives is None
    on_device = alone and loads is None and not form.tables_on_host  # a recording can neither wait nor count
    runner = ModelRunner(
        model, caches, tokenizer.vocab_size, environment.batch_invariant, drafter=drafter, calibration=calibration,
        rejection=_rejection(environment, settings), context=context,
        recording=recording_of(model, operators, classes) if on_device and not environment.batch_invariant else None,
    )  # fmt: skip
    policy = None
    if drafter is not None and (environment.mtp_varlen if settings.varlen is None else settings.varlen):
        measured = load_times(directory, platform_name(device, dtype))
        if measured is None:  # where there are ranks, all do this at the same time, step by step
            _, measured = runner.profile(sample_ids(tokenizer))
        policy = ScheduledDrafts(limits.drafts, RoundTimes(measured))
    scheduler = Scheduler(limits, replay, config.sliding_window, kv, ends, content_keys, pictures, policy)
    return Parts(config, tokenizer, runner, kv, scheduler, loads, pictures, policy, context)


def recording_of(model: InferenceModel, operators: RowOperators | None, classes: Sequence[int]) -> Recording | None:
    """How steps are recorded on this device; None where they cannot be."""
    if model.device.type != "cuda" or not model.recordable:
        return None
    most = min(SIZES[-1], *(most_rows(layer.experts.w13) for layer in model.weights.layers))
    if operators is not None:
        return Recording(model, Recorder(record=True), most)
    by_rows = InferenceModel(model.config, model.weights, classes, torch_rows)
    return Recording(by_rows, Recorder(record=True), most, UNPACKED_KEYS)


def _whole_model(
    checkpoint: Checkpoint | RandomCheckpoint,
    classes: Sequence[int],
    operators: RowOperators | None,
    form: Form,
    count: bool,
) -> tuple[InferenceModel, ExpertLoads | None]:
    """The model of a process that holds all experts."""
    config, loads = checkpoint.config, None
    experts: Sequence[RoutedExperts] | None = None
    if count:
        loads = ExpertLoads(config.num_hidden_layers, config.n_routed_experts, form.device)
        experts = [loads.counted(layer, local_experts) for layer in range(config.num_hidden_layers)]
    weights = load_weights(checkpoint, form.dtype, form.device, form.keep_quantized, tables_on=form.tables_on)
    tables = HostTables([*weights.engrams.values()], form.device) if form.tables_on_host and weights.engrams else None
    return InferenceModel(config, weights, classes, operators, experts, tables), loads


def _weights(directory: Path, settings: EngineConfig, device: torch.device) -> Checkpoint | RandomCheckpoint:
    if settings.load_format == "checkpoint":
        return Checkpoint(directory)
    return RandomCheckpoint(ModelConfig.from_file(directory / CONFIG_FILE), device)


def checked_classes(tokenizer: Tokenizer, config: ModelConfig, where: str) -> list[int]:
    """The Engram class of every token id, once the tokenizer is known to be this checkpoint's."""
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{where}: the tokenizer has {tokenizer.vocab_size} tokens but vocab_size is {config.vocab_size}; "
            "use the tokenizer.json the checkpoint was trained with"
        )
    classes = engram_classes(tokenizer)
    if config.engram_layer_ids:
        check_engram_classes(classes, config, where)
    return classes


def _limits(environment: Environment, settings: EngineConfig, config: ModelConfig) -> SchedulerLimits:
    """In batch-invariant mode no request begins behind a cached prefix: its windows would be cut there."""
    return SchedulerLimits(
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
        settings.max_chunk,
        prefix_hits=settings.prefix_cache and not environment.batch_invariant,
        drafts=_longest_draft(environment, settings, config),
    )


def _longest_draft(environment: Environment, settings: EngineConfig, config: ModelConfig) -> int:
    """How many drafts are verified behind a token; 0 where the checkpoint has no drafter."""
    block = config.dspark_block_size
    wanted = environment.nextn if settings.nextn is None else settings.nextn
    if not config.draft_stages:
        return 0
    if wanted > max(block, USUAL_DRAFT):
        raise ConfigError(
            f"the longest draft is {wanted} tokens; this checkpoint drafts blocks of {block}: set nextn or "
            f"DEEPINFER_USE_NEXTN_DECODE to 0 .. {block}"
        )
    return min(wanted, block)


def _pictures(config: ModelConfig, settings: EngineConfig, dtype: torch.dtype) -> Pictures | None:
    vision = config.vision
    if vision is None:
        return None
    limits = VisionLimits(
        vision.num_hidden_layers,
        settings.max_encoder_patches,
        settings.image_cache_bytes,
        cell_bytes=config.hidden_size * dtype.itemsize,
        patch_bytes=vision.hidden_size * dtype.itemsize,
    )
    return Pictures(limits, image_spans)


def _dtype(settings: EngineConfig, device: torch.device) -> torch.dtype:
    name = settings.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def sample_ids(tokenizer: Tokenizer) -> list[int]:
    """Real text to measure with: experts are chosen by it."""
    return tokenizer.encode(" ".join(line.strip() for line in (__doc__ + (assemble.__doc__ or "")).splitlines()) * 4)


def _rejection(environment: Environment, settings: EngineConfig) -> bool:
    if settings.draft_rule == "rejection" and environment.batch_invariant:
        raise ConfigError(
            'draft_rule is "rejection", by which tokens depend on what is drafted; DEEPINFER_BATCH_INVARIANT=1 takes '
            '"equality"'
        )
    return settings.draft_rule == "rejection"


def _pages(sizes: CacheSizes, settings: EngineConfig, device: torch.device) -> int:
    slots = sizes.slots
    wanted = sizes.pages_for(sizes.config.max_position_embeddings, slots)
    if settings.cache_bytes is None:
        fitting = sizes.pages_in(_free_memory(device) // 4)
    else:
        wanted = fitting = sizes.pages_in(settings.cache_bytes)
    pages = min(wanted, fitting)
    if pages < 1:
        raise ConfigError(
            f"the caches have {settings.cache_bytes or _free_memory(device) // 4} bytes; windows of {slots} requests "
            f"and one page take {sizes.total(1)}; set cache_bytes higher or max_num_seqs lower"
        )
    return pages


def _free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated; on a CPU the kernel's estimate, file caches counted as free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    if available is None:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1024 * int(available[1])


def _tiers(settings: EngineConfig, identity: str) -> list[Tier]:
    tiers: list[Tier] = []
    if settings.host_cache_bytes:
        tiers.append(HostTier(settings.host_cache_bytes))
    if settings.disk_cache is not None:
        tiers.append(DiskTier(settings.disk_cache, identity, settings.disk_cache_bytes))
    return tiers
