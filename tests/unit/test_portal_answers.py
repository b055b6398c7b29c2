"""What Bitrix24's answers mean; whatever is not plain is unclear."""

from typing import Any

import pytest

from crmctl.domain.installation_reasons import Reason
from crmctl.domain.installations import INSTALLED, NOT_INSTALLED, UNFINISHED, Finding, unclear
from crmctl.domain.portal_answers import Answer, Failure, TokenRefused, Tokens, read_app_info, read_renewal


def error(code: object, description: str = "", status: int = 400) -> Answer:
    return Answer(status, {"error": code, "error_description": description})


@pytest.mark.parametrize(
    ("answer", "finding"),
    [
        (Answer(200, {"result": {"INSTALLED": True, "LICENSE_TYPE": "ent"}}), INSTALLED),
        (Answer(200, {"result": {"INSTALLED": False}}), UNFINISHED),
        (Answer(200, {"result": {"INSTALLED": "Y"}}), unclear(Reason.UNEXPECTED_ANSWER)),
        (Answer(200, {"result": {"INSTALLED": 1}}), unclear(Reason.UNEXPECTED_ANSWER)),
        (Answer(200, {"result": {}}), unclear(Reason.UNEXPECTED_ANSWER)),
        (Answer(200, {"result": []}), unclear(Reason.UNEXPECTED_ANSWER)),
        (Answer(200, {}), unclear(Reason.UNEXPECTED_ANSWER)),
        (Answer(404, {"result": {"INSTALLED": True}}), unclear(Reason.UNEXPECTED_ANSWER)),
        (error("NOT_INSTALLED"), NOT_INSTALLED),
        (error("not_installed", status=200), NOT_INSTALLED),
        (error("APPLICATION_NOT_FOUND", status=404), NOT_INSTALLED),
        (error("ERROR_OAUTH", "Application not installed", 401), NOT_INSTALLED),
        (error("ERROR_OAUTH", "Something else"), unclear(Reason.OTHER_ERROR)),
        (error("QUERY_LIMIT_EXCEEDED", status=503), unclear(Reason.RATE_LIMITED)),
        (Answer(429), unclear(Reason.RATE_LIMITED)),
        (error("PORTAL_DELETED", status=403), unclear(Reason.PORTAL_DELETED)),
        (error("PAYMENT_REQUIRED", status=401), unclear(Reason.PAYMENT_REQUIRED)),
        (error("ACCESS_DENIED"), unclear(Reason.OTHER_ERROR)),
        (error("SOMETHING_NEW"), unclear(Reason.OTHER_ERROR)),
        (error({"nested": 1}), unclear(Reason.UNEXPECTED_ANSWER)),
        (Answer(500), unclear(Reason.SERVER_ERROR)),
        (Answer(502, {"result": {"INSTALLED": True}}), unclear(Reason.SERVER_ERROR)),
        (Answer(failure=Failure.TIMEOUT), unclear(Reason.TIMEOUT)),
        (Answer(failure=Failure.UNREACHABLE), unclear(Reason.UNREACHABLE)),
        (Answer(failure=Failure.BROKEN), unclear(Reason.UNREACHABLE)),
        (Answer(failure=Failure.REDIRECTED), unclear(Reason.REDIRECTED)),
        (Answer(failure=Failure.ADDRESS_REFUSED), unclear(Reason.ADDRESS_REFUSED)),
        (Answer(failure=Failure.UNREADABLE), unclear(Reason.UNEXPECTED_ANSWER)),
    ],
)
def test_an_answer_to_app_info(answer: Answer, finding: Finding) -> None:
    assert read_app_info(answer) == finding


@pytest.mark.parametrize("code", ["expired_token", "invalid_token", "NO_AUTH_FOUND"])
def test_a_token_that_the_portal_does_not_take_may_be_renewed(code: str) -> None:
    assert read_app_info(error(code, status=401)) is TokenRefused.EXPIRED


RENEWED: dict[str, Any] = {
    "access_token": "a" * 70,
    "refresh_token": "r" * 70,
    "expires": 1_900_000_000,
    "expires_in": 3600,
    "member_id": "member",
}


def test_renewed_tokens_are_taken() -> None:
    assert read_renewal(Answer(200, RENEWED), "member") == Tokens("a" * 70, "r" * 70, 1_900_000_000, 3600)


def test_renewed_tokens_of_which_only_the_duration_is_told() -> None:
    answer = Answer(200, {**RENEWED, "expires": None, "expires_in": "1800"})
    assert read_renewal(answer, "member") == Tokens("a" * 70, "r" * 70, None, 1800)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"member_id": "another"}, Reason.MEMBER_MISMATCH),
        ({"member_id": None}, Reason.MEMBER_MISMATCH),
        ({"refresh_token": ""}, Reason.UNEXPECTED_ANSWER),
        ({"access_token": None}, Reason.UNEXPECTED_ANSWER),
        ({"access_token": "a" * 256}, Reason.UNEXPECTED_ANSWER),
        ({"refresh_token": "with\nbreak"}, Reason.UNEXPECTED_ANSWER),
    ],
)
def test_tokens_that_are_not_to_be_stored(changes: dict[str, Any], reason: Reason) -> None:
    assert read_renewal(Answer(200, RENEWED | changes), "member") == unclear(reason)


@pytest.mark.parametrize(
    ("answer", "finding"),
    [
        (error("NOT_INSTALLED"), NOT_INSTALLED),
        (error("invalid_grant"), unclear(Reason.TOKEN_INVALID)),
        (error("invalid_client", status=401), unclear(Reason.CLIENT_REFUSED)),
        (error("PAYMENT_REQUIRED"), unclear(Reason.PAYMENT_REQUIRED)),
        (Answer(503), unclear(Reason.SERVER_ERROR)),
        (Answer(failure=Failure.TIMEOUT), unclear(Reason.TIMEOUT)),
    ],
)
def test_a_renewal_that_is_refused(answer: Answer, finding: Finding) -> None:
    assert read_renewal(answer, "member") == finding


def test_no_token_is_in_a_repr() -> None:
    secret = "s3cr3t" * 5
    tokens = Tokens(secret, secret, None, 1)
    assert secret not in repr(tokens) + repr(Answer(200, {"access_token": secret}))
