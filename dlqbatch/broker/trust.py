"""Whom we trust and who we are over TLS: the same for the broker and for its management API."""

from __future__ import annotations

import ssl
from typing import NoReturn

from dlqbatch.errors import SettingsError


def context(ca_file: str | None, cert_file: str | None, key_file: str | None, *, verify: bool) -> ssl.SSLContext:
    """SettingsError names the file that cannot be used."""
    try:
        made = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise SettingsError(f"tls_ca_file {ca_file} cannot be used: {_why(error)}.") from error
    if not verify:
        made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    if cert_file:
        files = f"tls_cert_file {cert_file}" + (f" with tls_key_file {key_file}" if key_file else "")

        def ask() -> NoReturn:
            # Else OpenSSL asks whoever sits at the terminal, and a run from cron waits for ever.
            raise SettingsError(f"{files} cannot be used: the key is encrypted; give it without a passphrase.")

        try:
            made.load_cert_chain(cert_file, key_file, password=ask)
        except OSError as error:
            raise SettingsError(f"{files} cannot be used: {_why(error)}.") from error
    return made


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key is not that of the certificate"
        return "it holds no certificate or key in PEM form" if error.reason in (None, "NO_START_LINE") else error.reason
    return error.strerror or str(error)
