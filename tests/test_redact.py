"""What counts as a secret, and what does not: values go, their names and everything around them stay."""

import base64
import hashlib
import random
import subprocess
import sys
import time
import uuid

import pytest
from conftest import CORPUS, transcripts
from hypothesis import given
from hypothesis import strategies as st

from haocompact.errors import HaoError
from haocompact.files import open_source
from haocompact.pipeline import Request, load
from haocompact.redact import SECRET, Redactor, mask_error, mask_secrets
from haocompact.summarize import serialize_conversation

PEM = "-----BEGIN {0}PRIVATE KEY-----\nFAKEKEY0007FAKEKEY0007FAKEKEY0007\n-----END {0}PRIVATE KEY-----"
BOTH = [  # (text, what is left of it): for summaries and for what is sent
    ("key sk-ant-api03-FAKEFAKEFAKEFAKE-0001 ok", f"key {SECRET} ok"),
    ("AWS_ACCESS_KEY_ID=AKIAFAKEFAKEFAKE0004\nPLAIN=ok", f"AWS_ACCESS_KEY_ID={SECRET}\nPLAIN=ok"),
    ("AWS_SECRET_ACCESS_KEY=FakeFakeFakeFakeFakeFakeFakeFakeFake0005", f"AWS_SECRET_ACCESS_KEY={SECRET}"),
    ("DB=postgres://app:FAKE-PASS-0006@db.invalid/x", f"DB=postgres://app:{SECRET}@db.invalid/x"),
    ("redis://:FAKE-PASS-0006@db.invalid/0", f"redis://:{SECRET}@db.invalid/0"),
    ('-H "Authorization: Bearer FAKE-BEARER-0002"', f'-H "Authorization: Bearer {SECRET}"'),
    (PEM.format(""), SECRET),
    (PEM.format("RSA ") + "\nPLAIN=ok", SECRET + "\nPLAIN=ok"),
    (PEM.format("OPENSSH ").replace("\n", "\\n") + '", next', SECRET + '", next'),
    (PEM.format("").split("\n-----END")[0] + "\nthe rest was cut", None),
    ("DB_PASSWORD: 'hunter2'", f"DB_PASSWORD: '{SECRET}'"),
    ("DB_PASS=hunter2", f"DB_PASS={SECRET}"),
    ('{"client_secret":"abc123def"}', f'{{"client_secret":"{SECRET}"}}'),
    (
        'env="{\\"api_key\\": \\"abc123def\\", \\"n\\": 1}"',
        f'env="{{\\"api_key\\": \\"{SECRET}\\", \\"n\\": 1}}"',
    ),
    ('write(content="TOKEN=abc123def\\nPLAIN=ok")', f'write(content="TOKEN={SECRET}\\nPLAIN=ok")'),
    ("ghp_FAKEFAKEFAKEFAKEFAKEFAKEFAKE0008", SECRET),
    ("密码是 abc12345", f"密码是 {SECRET}"),
]
SENT = [  # shapes that only the library knows
    ("key SG.FAKEFAKEFAKEFAKEFAKE00.FAKEFAKEFAKEFAKEFAKEFAKEFAKEFAKEFAKEFAKE000 ok", f"key {SECRET} ok"),
    ("pypi-AgEIcHlwaS5vcmc" + "FAKE" * 20, None),
]
PLAIN = [
    "src/haocompact/formats/claude_code.py:120: def token_of(key, password=None):",
    "tokens: 1234, max_tokens=4096, token_count: 99",
    "see https://example.invalid/a/b?page=2 and user@example.invalid",
    "the secret is that there is none; the key is on the left",
    "password: str, secret: Optional[str] = None, token = os.environ['TOKEN']",
    "sk-circle-fade-dot animation, pk_column, primary key of the table",
    "Basic authentication and Bearer tokens are supported",
    "commit " + hashlib.sha1(b"x").hexdigest(),
    "sha256 " + hashlib.sha256(b"x").hexdigest(),
    "id 550e8400-e29b-41d4-a716-446655440000 at 10.0.0.1 and 8.8.8.8",
    "-----BEGIN CERTIFICATE-----\nFAKEFAKE\n-----END CERTIFICATE-----",
    "-----BEGIN PUBLIC KEY-----\nFAKEFAKE\n-----END PUBLIC KEY-----",
]


@pytest.mark.parametrize(("text", "left"), BOTH)
def test_secrets_go_and_their_names_stay(text, left):
    for masked in (mask_secrets(text), Redactor()(text)):
        assert masked == left if left is not None else "FAKEKEY" not in masked
        assert mask_secrets(masked) == Redactor()(masked) == masked


@pytest.mark.parametrize(("text", "left"), SENT)
def test_shapes_that_the_library_knows(text, left):
    masked = Redactor()(text)
    assert masked == left if left is not None else "FAKEFAKE" not in masked
    assert mask_secrets(text) == text


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_secret_stays(text):
    assert Redactor()(text) == mask_secrets(text) == text


def test_hashes_ids_and_images_stay():
    numbers = random.Random(4)
    lines = [uuid.UUID(int=numbers.getrandbits(128)) for _ in range(200)]
    lines += [hashlib.sha256(str(i).encode()).hexdigest() for i in range(200)]
    text = "\n".join(map(str, lines)) + "\n" + base64.b64encode(numbers.randbytes(60_000)).decode()
    assert Redactor()(text) == text


def test_secrets_are_counted_once_by_kind():
    redactor = Redactor()
    for _ in range(2):
        redactor("AKIAFAKEFAKEFAKE0004 AKIAFAKEFAKEFAKE0005 password=hunter2")
        redactor(PEM.format("EC "))
    assert redactor.counts == {"API key": 2, "password or token": 1, "private key": 1}


WORDS = [
    "password",
    "=",
    "'",
    '"',
    "\\n",
    "hunter2",
    "sk-abcdefghij0123456789",
    " ",
    "\n",
    "Bearer ",
    "://a:b1@c",
    SECRET,
]


@given(st.lists(st.sampled_from(WORDS), max_size=12).map("".join))
def test_masking_twice_changes_nothing_more(text):
    once = Redactor()(text)
    assert Redactor()(once) == once
    assert text.count("\n") == once.count("\n") or "PRIVATE KEY" in text


@pytest.mark.parametrize(
    "text", ["password", "QUJDsecret", "://a:", "-----BEGIN PRIVATE KEY-----", "eyJ", "a", "key "]
)
def test_time_grows_with_length_only(text):
    start = time.process_time()
    Redactor()(text * (400_000 // len(text)))
    assert time.process_time() - start < 8


def test_little_of_real_sessions_is_taken_for_a_secret():
    files = transcripts(CORPUS)
    if not files:
        pytest.skip("the corpus is not here")
    redactor, chars, masked = Redactor(), 0, 0
    for path in files.values():
        try:
            with open_source(str(path)) as source:
                text = serialize_conversation(load(source, Request())[0].messages)
        except HaoError:
            continue
        chars += len(text)
        masked += redactor(text).count(SECRET)
    assert chars > 1_000_000
    assert sum(redactor.counts.values()) < 20
    assert masked < 60


def test_the_library_is_loaded_only_for_what_is_sent():
    code = "import sys, haocompact.redact as r; r.mask_secrets('password=x1'); print('detect_secrets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"


def test_an_error_text_is_masked_more_strictly():
    assert mask_error("token: on") == f"token: {SECRET}"
    assert mask_secrets("token: on") == "token: on"
