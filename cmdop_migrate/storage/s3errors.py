"""Translate failures of botocore: a pure table from its exceptions to StoreUnreachable or StoreDenied, with a hint.

StoreUnreachable is what a later try may cure; everything else is StoreDenied.
"""

from __future__ import annotations

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoAuthTokenError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    SSLError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)

from cmdop_migrate.errors import StoreDenied, StoreUnreachable

# A body that does not match its checksum: AWS and SeaweedFS answer with the first, MinIO with the second.
WRONG_SUM = {"BadDigest", "XAmzContentChecksumMismatch"}
# Transient although below 500: throttled, truncated, damaged in transit, overtaken.
_TRANSIENT = {
    *WRONG_SUM,
    "ConditionalRequestConflict",
    "IncompleteBody",
    "InvalidDigest",
    "NoSuchUpload",
    "OperationAborted",
    "PreconditionFailed",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "XAmzContentSHA256Mismatch",
}
_TRANSIENT_STATUS = {408, 409, 412, 425, 429}
_NO_CREDENTIALS = (
    CredentialRetrievalError,
    NoAuthTokenError,
    NoCredentialsError,
    PartialCredentialsError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)

_CREDENTIALS_HINT = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to credentials that may read, write, list and "
    "delete in this bucket."
)
_CLOCK_HINT = "The clock of this machine is wrong: set it (timedatectl), then try again."
_CA_HINT = "Add ca=/path/to/ca.pem to the URL of the store, or set AWS_CA_BUNDLE."
_DOWN_HINT = "Check that the endpoint runs and can be reached from this host, then try again."


def http_status(error: BaseException | None) -> int:
    """Return the HTTP status of the answer, or 0 if there was none."""
    if not isinstance(error, ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def error_code(error: BaseException | None) -> str:
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def translated(error: BotoCoreError | ClientError, what: str, url: str, bucket: str) -> StoreUnreachable | StoreDenied:
    """Return the error of the contract for an error of botocore. `what` completes the sentence "cannot …"."""
    reason = f"cannot {what} in {url}: {error}"
    if isinstance(error, ClientError):
        return _answered(error, reason, bucket)
    if isinstance(error, _NO_CREDENTIALS):
        return StoreDenied(reason, _CREDENTIALS_HINT)
    if isinstance(error, SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return StoreDenied(reason, _CA_HINT)
    if isinstance(error, ParamValidationError):
        return StoreDenied(reason, "Check the bucket and prefix in the URL of the store.")
    return StoreUnreachable(reason, _DOWN_HINT)


def _answered(error: ClientError, reason: str, bucket: str) -> StoreUnreachable | StoreDenied:
    code, status = error_code(error), http_status(error)
    if code == "NoSuchBucket":
        hint = f"Create the bucket {bucket}, or correct the URL of the store."
        return StoreDenied(f"{reason} (there is no bucket {bucket})", hint)
    if code in {"RequestTimeTooSkewed", "RequestExpired"}:
        return StoreDenied(reason, _CLOCK_HINT)
    if code in _TRANSIENT or status in _TRANSIENT_STATUS or status >= 500 or code == "InternalError":
        return StoreUnreachable(reason, "Try again; if it persists, look at the server's log.")
    if status in {301, 307} or code in {
        "AuthorizationHeaderMalformed",
        "PermanentRedirect",
        "IllegalLocationConstraintException",
    }:
        return StoreDenied(reason, "Set region= in the URL of the store to the bucket's region.")
    if status in {401, 403} or code in {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"}:
        return StoreDenied(reason, _CREDENTIALS_HINT)
    return StoreDenied(reason, "The server refused this request: check that endpoint= is an S3 server.")
