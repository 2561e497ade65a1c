"""Metrics for Prometheus, under vLLM's names after `tide:`, and TIDE's own: depths of tokens and layers that ran."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from TIDE.server.job import Job

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
ABSENT_IN_VLLM = ("depth_tokens", "layers_run")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAUGES = {
    "num_requests_running": "Answers that are being decoded.",
    "num_requests_waiting": "Answers that wait for a row.",
    "kv_cache_usage_perc": "Share of the K/V blocks in use, where there are blocks: on a GPU.",
}
COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "prefix_cache_queries": "Tokens of prompts that were looked for in the cache.",
    "prefix_cache_hits": "Tokens of prompts whose K/V were there already.",
    "generation_tokens": "Tokens written.",
    "request_success": "Answers that ended, by reason.",
    "spec_decode_num_drafts": "Verifications of drafts.",
    "spec_decode_num_draft_tokens": "Tokens drafted.",
    "spec_decode_num_accepted_tokens": "Drafts accepted.",
    "spec_decode_num_accepted_tokens_per_pos": "Drafts accepted, by place.",
    "depth_tokens": "Tokens by the number of layers run before they were decided.",
    "layers_run": "Layers run, counted for every token.",
}
TIMES = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "Between two deliveries of tokens of an answer.",
    "request_time_per_output_token_seconds": "Mean per token after the first, of an answer.",
    "e2e_request_latency_seconds": "From arrival to the end of an answer.",
    "request_queue_time_seconds": "From arrival to the row.",
    "request_prefill_time_seconds": "From the row to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_inference_time_seconds": "From the row to the last token.",
}
SIZES = {
    "iteration_tokens_total": "Tokens written in a round, of all rows.",
    "request_prompt_tokens": "Tokens of a prompt.",
    "request_generation_tokens": "Tokens of an answer.",
}
LABELS = {"request_success": "finished_reason", "spec_decode_num_accepted_tokens_per_pos": "position", "depth_tokens": "depth"}


class Metrics:
    """The metric families of one server, by name."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.model = model
        self._families: dict[str, Any] = {}
        self._add(Gauge, GAUGES)
        self._add(Counter, COUNTERS)
        self._add(Histogram, TIMES, buckets=SECONDS)
        self._add(Histogram, SIZES, buckets=TOKENS)

    def _add(self, kind: Any, helps: dict[str, str], **options: Any) -> None:
        for name, help in helps.items():
            labels = ["model_name", *([LABELS[name]] if name in LABELS else [])]
            family = kind(f"tide:{name}", help, labels, registry=self.registry, **options)
            self._families[name] = family if name in LABELS else family.labels(self.model)

    def family(self, name: str, label: object = None) -> Any:
        """Return the gauge, counter or histogram of a name, and of a label value where it has labels."""
        family = self._families[name]
        return family if label is None else family.labels(self.model, str(label))

    def count_start(self, job: Job) -> None:
        """Count a job that got a row."""
        self.family("prompt_tokens").inc(len(job.spec.ids))
        self.family("request_prompt_tokens").observe(len(job.spec.ids))
        self.family("request_queue_time_seconds").observe(job.times.started - job.times.arrived)

    def count_end(self, job: Job, reason: str) -> None:
        """Count a job that is over, and its work."""
        self.family("request_success", reason).inc()
        times, now = job.times, time.perf_counter()
        self.family("e2e_request_latency_seconds").observe(now - times.arrived)
        if job.row is None:
            return
        self.family("request_inference_time_seconds").observe(now - times.started)
        if job.tokens:
            self.family("request_prefill_time_seconds").observe(times.first - times.started)
            self.family("request_decode_time_seconds").observe(times.last - times.first)
        if job.tokens > 1:
            self.family("request_time_per_output_token_seconds").observe((times.last - times.first) / (job.tokens - 1))
        self.family("request_generation_tokens").observe(job.tokens)
        stats = job.row.stats
        self.family("layers_run").inc(stats.layers_run)
        self.family("prefix_cache_queries").inc(len(job.spec.ids))
        self.family("prefix_cache_hits").inc(stats.reused_tokens)
        self.family("spec_decode_num_draft_tokens").inc(sum(stats.drafted_by_step.values()))
        self.family("spec_decode_num_accepted_tokens").inc(sum(stats.accepted_by_step.values()))
        self.family("spec_decode_num_drafts").inc(stats.drafted_by_step.get(1, 0))
        for step, count in stats.accepted_by_step.items():
            self.family("spec_decode_num_accepted_tokens_per_pos", step - 1).inc(count)

    def text(self, with_vllm: bool) -> str:
        """Return all of them as Prometheus reads them."""
        ours = generate_latest(self.registry).decode()
        if not with_vllm:
            return ours
        shared = [line for line in ours.splitlines() if not any(f"tide:{name}" in line for name in ABSENT_IN_VLLM)]
        return ours + re.sub(r"^(# \w+ )?tide:", r"\1vllm:", "\n".join(shared), flags=re.MULTILINE) + "\n"
