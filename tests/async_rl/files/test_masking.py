"""Secrets are masked in configs and texts, and other values are not."""

import pytest

from async_rl.config import ConfigError, build_config, composed_values, load_config, plain_values
from async_rl.files.masking import MASK, hidden, mask_text, masked

SECRETS = [
    ("endpoint.run_key", "k-123"),
    ("cluster.rank_env.ANY", "s3cr3t"),
    ("cluster.replica_env.HF_TOKEN", "s3cr3t"),
    ("sync.directory", "s3://AKEY:se/cr3t@bucket/x"),
    ("task.options.api_key", "s3cr3t"),
    ("task.options.apiKey", "s3cr3t"),
    ("task.options.judgeAuth", "s3cr3t"),
    ("task.options.openai_key", "s3cr3t"),
    ("task.options.judge_token", "s3cr3t"),
    ("task.options.password", 123456),
    ("task.options.judge.headers.Authorization", "Bearer s3cr3t"),
    ("task.options.judge.url", "http://user:s3cr3t@host/v1"),
    ("task.options.judge.query", "https://host/v1?sig=s3cr3t&sv=2"),
    ("task.options.database", "postgresql://user:s3@cr3t@host/db"),
    ("task.options.clone", "https://s3cr3t@host/x"),
    ("task.options.client", "sk-abcdefghijklmnop123"),
    ("task.options.flags", "--api-key=s3cr3t"),
    ("engine.extra_args.hf_token", "s3cr3t"),
]
OPEN = {
    "answer_key": "extra_info.answer",
    "eos_token": "<|im_end|>",
    "pad_token": "[PAD]",
    "max_tokens": 512,
    "author": "Bob",
    "use_auth_token": True,
    "token": None,
    "hf_token": "${oc.env:HF_TOKEN}",
    "template": "The key={answer} of https://host:80/a",
    "folder": "abfs://container@account.dfs.core.windows.net/x",
    "top_k": 4,
}


def nested(key, value):
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize(("key", "value"), SECRETS, ids=[key for key, _ in SECRETS])
def test_a_secret_is_masked_and_a_record_without_it_is_refused(key, value):
    shown = masked(nested(key, value))
    assert list(hidden(shown)) == [key]
    for part in ("s3cr3t", "se/cr3t", "s3@cr3t", "k-123", "123456", "abcdefgh"):
        assert part not in str(shown)
    with pytest.raises(ConfigError, match=key):
        build_config({**composed_values([]), **nested(key, MASK)})


def test_values_that_are_no_secrets_stay():
    assert masked({"task": {"options": OPEN}}) == {"task": {"options": OPEN}}
    values = plain_values(load_config([]))
    assert masked(values) == values and not list(hidden(values))
    assert build_config(values) == load_config([])


def test_lists_and_mappings_with_a_secret_name_are_masked_inside():
    assert masked({"api_keys": ["a", "b"], "credentials": {"user": "a", "pass": "b"}}) == {
        "api_keys": [MASK, MASK],
        "credentials": {"user": MASK, "pass": MASK},
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ftp://u:p@h/x cannot be read: Timeout", f"ftp://{MASK}@h/x cannot be read: Timeout"),
        ("'endpoint.run_key=abc' is not an override", f"'endpoint.run_key={MASK}' is not an override"),
        ("a url http://host:80/x and a mail a@b", "a url http://host:80/x and a mail a@b"),
        ("step 3 of task-abcdefghijklmnopqrst", "step 3 of task-abcdefghijklmnopqrst"),
    ],
)
def test_texts_are_shown_without_secrets(text, shown):
    assert mask_text(text) == shown
