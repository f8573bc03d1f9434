"""What counts as a secret, and that none gets into a plan, a site file or a message."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from command import dray
from dray.config.load_toml import validate
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract import secrets
from dray.contract.findings import ConfigError

pytestmark = pytest.mark.hostile("secrets")

HF = "hf_" + "a1B2" * 8
HEX = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "SSHPASS",
        "PGPASSWORD",
        "MYSQL_PWD",
        "HTTP_AUTH",
        "BASIC_AUTH",
        "AUTH_HEADER",
        "SLACK_WEBHOOK",
        "SLACK_WEBHOOK_URL",
        "aws_secret_access_key",
        "GITHUB_PAT",
        "DB_PASSPHRASE",
        "SESSION_COOKIE",
        "AZURE_CREDENTIALS",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert secrets.is_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "PWD",
        "OLDPWD",
        "TOKENIZERS_PARALLELISM",
        "SSH_AUTH_SOCK",
        "AWS_SHARED_CREDENTIALS_FILE",
        "HF_TOKEN_PATH",
        "NCCL_IB_PKEY",
        "PATH",
        "COMPASS_HOME",
        "MAX_TOKENS",
        "AUTHOR",
        "KEYBOARD",
        "XAUTHORITY",
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not secrets.is_name(name)


@pytest.mark.parametrize(
    "value",
    [
        HF,
        "ghp_" + "a1" * 10,
        "github_pat_" + "a1" * 12,
        "glpat-" + "a1" * 10,
        "sk-proj-" + "a1" * 12,
        "AKIA" + "A1" * 8,
        "xoxb-1234567890-abc",
        "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.sig",
        "https://me:hunter2@host/path",
        "redis://:hunter2@host:6379/0",
        "http://me:hunter2@proxy:3128",
        "https://hooks.slack.com/services/T0/B0/x",
        "https://discord.com/api/webhooks/1/x",
        "https://host/x?access_token=0123456789",
        "Authorization: Bearer abc",
        "authorization: Basic bWU6cHc=",
        "-----BEGIN OPENSSH PRIVATE KEY-----",
    ],
)
def test_values_that_are_secrets(value: str) -> None:
    assert secrets.is_value(value)
    assert secrets.is_value(f"before {value} after")
    assert "[secret]" in secrets.redacted(f"it said: {value}")
    with pytest.raises(ConfigError) as refused:
        validate(Recipe, {"name": "r", "command": {"argv": ["t"]}, "env": {"X": value}}, what="it")
    assert value not in str(refused.value)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "hf_cache",
        "https://host:8080/path",
        "https://me@host/",
        "https://$USER:$PASSWORD@host/",
        "sk-learn",
        "a task-force-of-2024-and-more",
        "s3://bucket/a:b@c",
        "git@github.com:me/it.git",
        "sha256:" + "0" * 64,
        "Bearer of news",
        "/scratch/hf_home/x",
        "hub:me/data:train+test",
        "Salesforce/wikitext",
    ],
)
def test_values_that_are_none(value: str) -> None:
    assert not secrets.is_value(value)
    assert secrets.redacted(value) == value


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["t.py", f"--token={HF}"], ["--token"]),
        (["t.py", "--token", HF], ["--token"]),
        (["t.py", HF], ["argument 2"]),
        (["curl", "-H", "Authorization: Bearer abc.def"], ["argument 3"]),
        (["bash", "-c", f"exec train --token {HF} --lr 1"], ["--token"]),
        (["bash", "-c", "WANDB_API_KEY=" + HEX + " train"], ["WANDB_API_KEY"]),
        (["t.py", "--wandb-key", HEX], ["--wandb-key"]),
        (["t.py", "wandb.api_key=" + HEX], ["wandb.api_key"]),
        (["t.py", "--password=hunter2"], ["--password"]),
        (["t.py", "--password", "hunter2", f"--token={HF}"], ["--password", "--token"]),
        (["git", "clone", "https://me:hunter2@host/it"], ["argument 3"]),
        (["t.py", "--log=https://me:hunter2@host/?a=b"], ["--log"]),
        (["bash", "-c", 'exec train --token "$HF_TOKEN" --password=$PW'], []),
        (["t.py", "--pad-token=<pad>", "--eos_token", "[EOS]", "--max-tokens=100", "--key=text"], []),
        (["t.py", "--use_auth_token", "True", "--secret=false", "--password-length=12"], []),
        (["t.py", "--token-file=/private/token", "--key", "/etc/ssl/key.pem", "--image-token-index=32000"], []),
        (["t.py", "--sha", HEX, "--tokenizer", "gpt2-of-some-length-12345", ""], []),
    ],
)
def test_commands(argv: list[str], found: list[str]) -> None:
    assert secrets.in_command(argv) == found


def test_a_command_with_a_secret_is_refused_without_showing_it() -> None:
    for overrides in ([], [f'command.argv=["t.py", "--token={HF}"]']):
        table = {"name": "r"} if overrides else {"name": "r", "command": {"argv": ["t.py", f"--token={HF}"]}}
        with pytest.raises(ConfigError) as refused:
            validate(Recipe, table, overrides, what="the command's recipe")
        assert str(refused.value).removesuffix(" (command line)") == (
            "the command's recipe has 1 error\n"
            "  found:  command.argv   --token: this looks like a secret, and `ps`, Slurm and every run folder show a "
            "command; export it where you submit, name it in pass_env, and let the program read it there, or a shell: "
            "bash -c 'exec python train.py --token \"$HF_TOKEN\"'"
        )


@pytest.mark.parametrize(
    "override", [f"model.name={HF}", f"data.train=https://me:{HEX}@h/x", f"nodes={HF}", HF, f"x={HF}"]
)
def test_no_other_key_takes_or_shows_one(override: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(Recipe, {"name": "r", "command": {"argv": ["t"]}}, [override], what="it")
    assert HF not in str(refused.value)
    assert HEX not in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"env": [{"name": "NCCL_AUTH", "value": "x", "why": "y"}]}, "NCCL_AUTH looks like a secret"),
        ({"env": [{"name": "http_proxy", "value": f"http://me:{HEX}@p", "why": "y"}]}, "value: this looks like"),
        ({"binds": [{"path": "$HF_TOKEN/x", "why": "y"}]}, "$HF_TOKEN looks like a secret"),
    ],
)
def test_a_site_names_no_secret(keys: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(Site, {"name": "s", "about": "", **keys}, what="site s.toml")
    assert problem in str(refused.value)
    assert HEX not in str(refused.value)


def test_what_was_handed_in_is_not_shown() -> None:
    environ = {
        "HF_TOKEN": "my-own-token",
        "MODE": "offline",
        "HF_HOME": "/scratch/me",
        "KEY": "/no/path",
        "B": "line one\nline two",
    }
    values = secrets.passed(["HF_TOKEN", "MODE", "HF_HOME", "KEY", "B", "UNSET"], environ)
    text = f"token my-own-token, offline, /scratch/me/x, /no/path, line two and {HF}"
    assert secrets.redacted(text, values) == "token [HF_TOKEN], offline, /scratch/me/x, [KEY], [B] and [secret]"


def test_the_longer_of_two_values_goes_first() -> None:
    addresses = {
        "HF_ENDPOINT": "https://hub.example.org",
        "HOOK": "https://x:pass-word@example.org/",
        "URL": "http://e/?key=1",
    }
    assert sorted(secrets.passed(addresses, addresses).values()) == ["HOOK", "URL"]
    assert secrets.redacted("12345678-9", secrets.passed(["A", "B"], {"A": "12345678", "B": "12345678-9"})) == "[B]"


KEY = "9f8e7d6c5b4a39281706f5e4d3c2b1a0"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f'WANDB_API_KEY = "{KEY}"', 'WANDB_API_KEY = "[secret]"'),
        (f"os.environ['AWS_SECRET_ACCESS_KEY'] = '{KEY}'", "os.environ['AWS_SECRET_ACCESS_KEY'] = '[secret]'"),
        ('db_password = "correct horse"', 'db_password = "[secret]"'),
        (f'login(token="{KEY}", add=1)', 'login(token="[secret]", add=1)'),
        (f'{{"api_key": "{KEY}"}}', '{"api_key": "[secret]"}'),
        (f'password = f"{KEY}"', 'password = f"[secret]"'),
        ("export MY_PASSWORD=hunter22", "export MY_PASSWORD=[secret]"),
        (f"password: {KEY}", "password: [secret]"),
        (
            "k = '''-----BEGIN RSA PRIVATE KEY-----\n+MIIE\n+x/y=\n+-----END RSA PRIVATE KEY-----'''\n+x = 1",
            "k = '''[secret]'''\n+x = 1",
        ),
    ],
)
def test_code_without_its_secrets(line: str, shown: str) -> None:
    assert secrets.redacted_code(f"-x = 1\n+{line}\n") == f"-x = 1\n+{shown}\n"


@pytest.mark.parametrize(
    "line",
    [
        'pad_token = "<|endoftext|>"', "password = getpass.getpass()", 'key = "text"', 'key="a/path/to/it"',
        "def login(password: str, token=self.config.providers2.some_token):", "PASSWORD=$MINE", "PASSWORD=",
        'secret = os.environ["HF_TOKEN"]', "login(api_key=args.api_key)", 'if password == "":', "password=name",
        'tokens = "0123456789abcdef0123456789abcdef"', 'TOKEN_FILE = "0123456789abcdef0123456789abcdef"',
    ],
)  # fmt: skip
def test_code_that_gives_none(line: str) -> None:
    assert secrets.redacted_code(f"+{line}\n") == f"+{line}\n"


@pytest.mark.seconds
@pytest.mark.parametrize(
    "part", ["a.", "sk-", "eyJaaaaaaaaaaaa-", "://", "?", "https://", "a:b@", "Bearer ", "authorization: ", "gho_-",
             "a", "a ", "key =", "-----BEGIN PRIVATE KEY-----"]
)  # fmt: skip
def test_a_long_text_takes_no_time(part: str) -> None:
    began = time.process_time()
    secrets.redacted_code(part * (200_000 // len(part)))
    secrets.in_command(["x", "--key=" + part * 20_000])
    assert time.process_time() - began < 10


def test_no_message_of_a_verb_shows_one(tmp_path: Path) -> None:
    ended = dray("plan", "a=b", "recipe", "--", "t.py", f"--token={HF}", cwd=tmp_path)
    assert ended.returncode == 78
    assert HF not in ended.stdout + ended.stderr
