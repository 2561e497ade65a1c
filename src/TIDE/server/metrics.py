"""Metrics for Prometheus, under vLLM's names after `tide:`, and TIDE's own: depths of tokens and layers that ran."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from TIDE.server.job import Job

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
OWN = ("depth_tokens", "layers_run")  # which vLLM has not
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The counts of one server."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.model = model
        self.running = self._gauge("num_requests_running", "Answers that are being decoded.")
        self.waiting = self._gauge("num_requests_waiting", "Answers that wait for a row.")
        self.cache = self._gauge("kv_cache_usage_perc", "Share of the K/V blocks in use, where there are blocks: on a GPU.")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.prefix_queries = self._counter("prefix_cache_queries", "Tokens of prompts that were looked for in the cache.")
        self.prefix_hits = self._counter("prefix_cache_hits", "Tokens of prompts whose K/V were there already.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens written.")
        self.success = self._counter("request_success", "Answers that ended, by reason.", "finished_reason")
        self.drafts = self._counter("spec_decode_num_drafts", "Verifications of drafts.")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Drafts accepted.")
        self.accepted_at = self._counter("spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by place.", "position")
        self.depth = self._counter("depth_tokens", "Tokens by the number of layers run before they were decided.", "depth")
        self.layers = self._counter("layers_run", "Layers run, counted for every token.")
        self.first_token = self._times("time_to_first_token_seconds", "From arrival to the first token.")
        self.between = self._times("inter_token_latency_seconds", "Between two deliveries of tokens of an answer.")
        self.per_token = self._times("request_time_per_output_token_seconds", "Mean per token after the first, of an answer.")
        self.whole = self._times("e2e_request_latency_seconds", "From arrival to the end of an answer.")
        self.queued = self._times("request_queue_time_seconds", "From arrival to the row.")
        self.prefill = self._times("request_prefill_time_seconds", "From the row to the first token.")
        self.decode = self._times("request_decode_time_seconds", "From the first token to the last.")
        self.inference = self._times("request_inference_time_seconds", "From the row to the last token.")
        self.iteration = self._sizes("iteration_tokens_total", "Tokens written in a round, of all rows.")
        self.prompt_sizes = self._sizes("request_prompt_tokens", "Tokens of a prompt.")
        self.answer_sizes = self._sizes("request_generation_tokens", "Tokens of an answer.")

    def started(self, job: Job) -> None:
        """Count a job that got a row."""
        self.prompt_tokens.inc(len(job.ask.ids))
        self.prompt_sizes.observe(len(job.ask.ids))
        self.queued.observe(job.times.started - job.times.arrived)

    def ended(self, job: Job, reason: str) -> None:
        """Count a job that is over, and what it did."""
        self.success.labels(self.model, reason).inc()
        times, now = job.times, time.perf_counter()
        self.whole.observe(now - times.arrived)
        if job.row is None:
            return
        self.inference.observe(now - times.started)
        if job.tokens:
            self.prefill.observe(times.first - times.started)
            self.decode.observe(times.last - times.first)
        if job.tokens > 1:
            self.per_token.observe((times.last - times.first) / (job.tokens - 1))
        self.answer_sizes.observe(job.tokens)
        stats = job.row.stats
        self.layers.inc(stats.layers_run)
        self.prefix_queries.inc(len(job.ask.ids))
        self.prefix_hits.inc(stats.reused_tokens)
        self.draft_tokens.inc(sum(stats.drafted_by_step.values()))
        self.accepted.inc(sum(stats.accepted_by_step.values()))
        self.drafts.inc(stats.drafted_by_step.get(1, 0))
        for step, count in stats.accepted_by_step.items():
            self.accepted_at.labels(self.model, str(step - 1)).inc(count)

    def text(self, with_vllm: bool) -> str:
        """Return all of them as Prometheus reads them."""
        ours = generate_latest(self.registry).decode()
        if not with_vllm:
            return ours
        shared = [line for line in ours.splitlines() if not any(f"tide:{name}" in line for name in OWN)]
        return ours + re.sub(r"^(# \w+ )?tide:", r"\1vllm:", "\n".join(shared), flags=re.MULTILINE) + "\n"

    def _gauge(self, name: str, said: str) -> Gauge:
        return Gauge(f"tide:{name}", said, ["model_name"], registry=self.registry).labels(self.model)

    def _counter(self, name: str, said: str, *labels: str) -> Counter:
        made = Counter(f"tide:{name}", said, ["model_name", *labels], registry=self.registry)
        return made if labels else made.labels(self.model)

    def _times(self, name: str, said: str) -> Histogram:
        return Histogram(f"tide:{name}", said, ["model_name"], registry=self.registry, buckets=SECONDS).labels(self.model)

    def _sizes(self, name: str, said: str) -> Histogram:
        return Histogram(f"tide:{name}", said, ["model_name"], registry=self.registry, buckets=TOKENS).labels(self.model)
