"""The scheduler: requests in, plans out, results back, until every request has ended."""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from collections.abc import Sequence as Seq

from deepinfer.core.outputs import TokenLogprobs
from deepinfer.core.plan import Plan
from deepinfer.core.request import Request
from deepinfer.engine.replay import ReplayPolicy
from deepinfer.engine.scheduler.admission import Admission
from deepinfer.engine.scheduler.departures import Departures
from deepinfer.engine.scheduler.draft import Draft
from deepinfer.engine.scheduler.ending import EndRules
from deepinfer.engine.scheduler.flights import Flights
from deepinfer.engine.scheduler.growth import Growth
from deepinfer.engine.scheduler.job import Job, Phase
from deepinfer.engine.scheduler.landing import Landing
from deepinfer.engine.scheduler.limits import SchedulerLimits
from deepinfer.engine.scheduler.order import Ranked, rank
from deepinfer.engine.scheduler.pictures import Pictures
from deepinfer.engine.scheduler.ports import DraftPolicy, PageOwner, Verification
from deepinfer.engine.scheduler.running import Running
from deepinfer.engine.scheduler.statistics import Statistics

Keys = Callable[[Request], Seq[Hashable]]
"""Maps a request to the content of its prompt's tokens, one key a token."""


def token_keys(request: Request) -> Seq[Hashable]:
    """Return the keys of a prompt without images: its token ids."""
    return request.token_ids


class Scheduler:
    """Chooses the rows of every step.

    Plain use: plan, run, commit, and again. Asynchronous use: plan step n + 1 before step n is committed; newest tokens
    then stay on the device, and what n + 1 computes for a request that ended with n is dropped. Both give each request
    the same tokens. Not thread-safe.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        replay: ReplayPolicy,
        window: int,
        kv: PageOwner,
        ends: EndRules,
        keys: Keys = token_keys,
        pictures: Pictures | None = None,
        policy: DraftPolicy | None = None,
    ) -> None:
        """Schedule for a model with sliding windows of `window` tokens; all pages of `kv` belong to this scheduler.

        So do `pictures`; without them requests have no images. policy: how many drafts are verified; None: all that the
        limits allow.
        """
        self.statistics = Statistics()
        self._limits = limits
        self._replay = replay
        self._kv = kv
        self._ends = ends
        self._keys, self._policy = keys, policy
        self._pictures = pictures or Pictures()
        self._jobs: dict[int, Job] = {}
        self._waiting = Ranked()
        self._followers: dict[int, list[Job]] = {}
        self._running = Running(limits.max_num_seqs)
        self._flights = Flights()
        self._departures = Departures(kv, self._running, self._waiting, self._jobs, self.statistics)
        self._growth = Growth(kv, self._running, self._departures)
        self._admission = Admission(kv, self._running, self._waiting, window, limits.prefix_hits)
        self._landing = Landing(kv, self._departures, self.statistics)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot or pages."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that get rows."""
        return len(self._running)

    def has_work(self) -> bool:
        """Whether a request has not ended or a step is in flight."""
        return bool(self._jobs)

    def add(self, request: Request, after: int | None = None) -> int:
        """Queue a request and return its id; RequestError, and nothing changes, if it can never fit.

        after: id of a request with the same prompt, whose pages it will share: it is queued when that one has run the
        prompt, or has ended.
        """
        capacity = self._kv.total_pages * self._kv.page_size
        length = len(request.token_ids)
        replay_start = 0 if request.params.prompt_logprobs is not None else self._replay.start(length)
        sequence = self._ends.sequence(request, replay_start, capacity)
        request_id = self.statistics.added
        job = Job(
            request_id,
            sequence,
            self._keys(request),
            rank(request.priority, self._flights.next_number, request_id, self._limits.ageing_steps),
            end=length + sequence.max_new_tokens - 1,
            decoder_from=sequence.replay_start if self._replay.mode == "compact" else 0,
            images=self._pictures.spans(request),
        )
        self._jobs[request_id] = job
        self.statistics.added += 1
        leader = None if after is None else self._jobs.get(after)
        if leader is None or leader.sequence.generated or not self._shares(job):
            self._waiting.insert(job)
        else:
            job.phase = Phase.FOLLOWING
            self._followers.setdefault(leader.request_id, []).append(job)
        return request_id

    def job(self, request_id: int) -> Job:
        """Return the state of a request that has not ended; KeyError for any other."""
        return self._jobs[request_id]

    def cancel(self, request_id: int) -> Job | None:
        """End a request now and return it with the tokens it has; None if it has ended already (or never was)."""
        job = self._jobs.get(request_id)
        if job is None or job.phase is Phase.ENDED:
            return None
        self._departures.end(job)
        self.statistics.cancelled += 1
        self._let_follow([job])
        return job

    def plan(self) -> Plan | None:
        """Choose the next step: decode rows, then prompts already begun, then new ones.

        None if nothing can run before the step in flight is committed, or if there is no work. ValueError if two steps
        are in flight.
        """
        self._flights.check_room()
        draft = Draft(self._limits.max_num_batched_tokens, self._verification())
        self._pictures.start_plan(self._running.prefilling)
        self._decode(draft)
        self._prefill(draft)
        self._admit(draft)
        self._pictures.look_ahead(self._running.prefilling)
        if not draft.jobs and not self._pictures.busy:
            self._check_alive()
            return None
        draft.encode(*self._pictures.planned())
        plan = self._flights.open(draft)
        self.statistics.planned(plan, draft.prefill_rows)
        return plan

    def commit(
        self,
        number: int,
        tokens: Mapping[int, Seq[int]],
        failures: Mapping[int, Exception] | None = None,
        chances: Mapping[int, Seq[float]] | None = None,
    ) -> list[Job]:
        """Take the results of step `number`: request id -> its next tokens, for each span that samples.

        There is one token, and one more for each draft that was accepted. `chances`: survival of the drafts of the
        blocks that the step drafted. `failures`: requests that could not be served, and why; they end with an error and
        nobody else notices. Returns the jobs that got tokens or failed, ended ones included (`sequence.finish_reason`
        says so); tokens of requests that ended before, or behind one that ends it, are ignored. ValueError, and nothing
        changes, for a step that is not the oldest in flight or a missing token.
        """
        failed = [(self._jobs[one], error) for one, error in (failures or {}).items() if one in self._jobs]
        extended = self._landing.take(self._flights.oldest(number), tokens, chances or {}, failed)
        self._pictures.forget(image.digest for job, _ in failed for image in job.images)
        self._flights.close(number)
        self._let_follow(extended)
        return extended

    def take_prompt_logprobs(self, request_id: int, first: int, found: Seq[TokenLogprobs]) -> None:
        """Take those of a request's prompt tokens from position `first` on, before the step that gave them lands."""
        job = self._jobs.get(request_id)
        if job is not None and job.phase is not Phase.ENDED and not job.void:
            job.sequence.prompt_logprobs.update(enumerate(found, first))

    def fail(self, number: int, error: Exception, guilty: Collection[int] | None = None) -> list[Job]:
        """Take note that step `number` failed, and return the requests lost with it, their `error` set.

        guilty: ids of the requests at fault; the step's other requests begin again and lose nothing. None: all of them.
        Requests outside the step are unaffected. ValueError if the step is not the oldest in flight.
        """
        flight = self._flights.close(number)
        self._pictures.forget(encode.digest for encode in flight.plan.encodes)
        lost = self._landing.lose(flight, error, guilty)
        self._let_follow(lost)
        return lost

    def _shares(self, job: Job) -> bool:
        """Whether others with the same prompt could start from pages of it."""
        scored = job.sequence.request.params.prompt_logprobs is not None
        return self._limits.prefix_hits and not scored and job.sequence.length > self._kv.page_size

    def _let_follow(self, leaders: Iterable[Job]) -> None:
        """Queue what waited for requests that have run their prompt or ended."""
        for leader in leaders:
            for job in self._followers.pop(leader.request_id, ()):
                if job.phase is Phase.FOLLOWING:
                    job.phase = Phase.WAITING
                    self._waiting.insert(job)

    def _decode(self, draft: Draft) -> None:
        self._growth.start_plan()
        spare = draft.limit_drafts(self._rows_for_drafts(draft))
        for job in self._running.decoding:
            if job.phase is not Phase.RUNNING or job.next >= job.end:  # just preempted; or its last token is in flight
                continue
            # Where steps in flight verify drafts, the newest token may lie anywhere between next and next + slack.
            least = min(job.next + job.slack + 1, job.end)
            drafts = min(draft.verification.depth, spare, job.end - job.next - 1)
            wanted = min(least + drafts, job.end)
            if wanted > job.room:
                held = len(job.pages)
                if not self._growth.make_room(job, least, wanted):
                    continue
                if len(job.pages) > held:
                    draft.hold(job)
            draft.decode(job, drafts)
            if draft.verification.total is None:
                spare -= drafts
        draft.decoded()

    def _rows_for_drafts(self, draft: Draft) -> int:
        """Rows of the step that drafts may take: what newest tokens leave, half of it while prompts are to be run."""
        rest = max(0, draft.budget - len(self._running.decoding))
        return rest // 2 if len(self._running.prefilling) or len(self._waiting) else rest

    def _prefill(self, draft: Draft) -> None:
        for job in self._running.prefilling:
            if not draft.budget:
                return
            self._run_chunk(draft, job)

    def _admit(self, draft: Draft) -> None:
        while draft.budget and (job := self._admission.admit_next(draft)) is not None:
            self._run_chunk(draft, job)

    def _run_chunk(self, draft: Draft, job: Job) -> None:
        end = self._pictures.reach(job, draft.next_chunk(job, self._limits.max_chunk or draft.budget))
        if end > job.next and draft.prefill(job, end):
            self._running.prefilling.remove(job)
            self._running.decoding.insert(job)

    def _verification(self) -> Verification:
        depth = self._limits.drafts
        if self._policy is None or not depth:
            return Verification(depth, None, depth > 0, depth > 0)
        return self._policy.decide([job.known_chances for job in self._running.decoding])

    def _check_alive(self) -> None:
        """RuntimeError instead of waiting for ever, should pages have been lost."""
        if self._jobs and not len(self._flights):
            raise RuntimeError(
                f"{len(self._jobs)} requests cannot run though no step is in flight: "
                f"{self._kv.available_pages} of {self._kv.total_pages} pages are available"
            )
