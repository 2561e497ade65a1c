"""Metrics, read by Prometheus' own parser, and the access log."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families as families

from TIDE.server import ServerSettings

# asserted by vLLM's own tests of /metrics, as far as there is a thing here to count
NAMES = """num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens generation_tokens request_success
time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds
request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds request_inference_time_seconds
iteration_tokens_total request_prompt_tokens request_generation_tokens spec_decode_num_drafts spec_decode_num_draft_tokens
spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos prefix_cache_queries prefix_cache_hits"""


def read(server) -> dict[str, dict[tuple, float]]:
    found: dict[str, dict[tuple, float]] = {}
    for family in families(server.http.get("/metrics").text):
        assert family.documentation and family.name not in found
        samples = {(sample.name, *sorted(sample.labels.items())): sample.value for sample in family.samples}
        found[family.name] = samples
    return found


def total(samples: dict[tuple, float], name: str) -> float:
    return sum(value for (own, *_), value in samples.items() if own == name)


def test_everything_that_happened_is_counted(server):
    before = read(server)
    answers = [server.post("/v1/completions", prompt="Hello", max_tokens=8, tide={"details": True}).json() for _ in range(3)]
    assert server.post("/v1/completions", prompt="~", max_tokens=8, stop=[" "], n=2).status_code == 200
    assert server.is_idle()
    after = read(server)

    def counted(name: str) -> float:
        return total(after[f"tide:{name}"], f"tide:{name}_total") - total(before[f"tide:{name}"], f"tide:{name}_total")

    details = [answer["choices"][0]["tide"] for answer in answers]
    assert counted("prompt_tokens") == 3 * 5 + 2 * 1
    assert counted("generation_tokens") >= 3 * 8 + 2
    assert counted("request_success") == 5
    assert counted("spec_decode_num_draft_tokens") >= sum(own["drafted"] for own in details) > 0
    assert counted("layers_run") >= sum(own["layers_run"] for own in details)
    assert counted("depth_tokens") == counted("generation_tokens")
    name = "tide:e2e_request_latency_seconds"
    whole = after[name]
    assert total(whole, f"{name}_count") - total(before[name], f"{name}_count") == 5
    assert {dict(labels)["model_name"] for _, *labels in whole} == {"tiny"}
    assert total(after["tide:num_requests_running"], "tide:num_requests_running") == 0


def test_tokens_of_prompts_that_were_there_already_are_counted(server):
    def counted() -> list[float]:
        found = read(server)
        return [total(found[f"tide:{name}"], f"tide:{name}_total") for name in ("prefix_cache_queries", "prefix_cache_hits")]

    prompt, before = "§ a prompt that begins as no other one does, and is longer than what is worth a copy", counted()
    for _ in range(2):
        assert server.post("/v1/completions", prompt=prompt, max_tokens=2).status_code == 200
    assert server.is_idle()
    queries, hits = (now - then for now, then in zip(counted(), before, strict=True))
    length = len(prompt.encode())
    assert queries == 2 * length and hits == length - 1


def test_names_are_vllms_and_under_its_prefix_if_asked_for(server, another):
    ours = read(server)
    assert {f"tide:{name}" for name in NAMES.split()} <= ours.keys()
    assert not any(name.startswith("vllm:") for name in ours)
    both = read(another(ServerSettings(vllm_metrics=True), router=None))
    assert {f"{prefix}:{name}" for prefix in ("tide", "vllm") for name in NAMES.split()} <= both.keys()
    assert "tide:depth_tokens" in both and "vllm:depth_tokens" not in both


def test_a_line_of_log_tells_of_a_request(server):
    server.log.lines.clear()
    body = dict(messages=[{"role": "user", "content": "Hi"}], max_tokens=3, stream=True)
    answer = server.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"})
    (line,) = map(json.loads, server.lines(1))
    assert answer.headers["x-request-id"] == line["id"] == "mine-1"
    assert line["path"] == "/v1/chat/completions" and line["status"] == 200 and line["stream"] and line["model"] == "tiny"
    assert line["completion_tokens"] == 3 and line["prompt_tokens"] > 3 and line["seconds"] > 0


@pytest.mark.parametrize("given", ["a b", "x" * 65, '"', "é"])
def test_an_id_that_would_not_be_safe_in_a_log_is_replaced(server, given):
    answer = server.http.get("/health", headers={"x-request-id": given.encode("latin-1")})
    assert len(answer.headers["x-request-id"]) == 32
