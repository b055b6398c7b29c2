"""Apache Kafka's own broker, fetched once with Maven into a cache folder and used offline from then on."""

import contextlib
import fcntl
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from crmctl.domain.errors import ConfigurationError, UnavailableError

VERSION: Final = "4.4.0"

_OLDEST_JAVA: Final = 17
_LOGGING: Final = "1.7.36"  # the release of slf4j-api that this Kafka is built with
_FOLDER: Final = f"kafka_2.13-{VERSION}-slf4j-simple-{_LOGGING}"
_UNFINISHED: Final = f"{_FOLDER}.unfinished-"
_PLUGIN: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1"
_FETCH_SECONDS: Final = 900.0
_POM: Final = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>crmctl</groupId>
  <artifactId>embedded-kafka</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_2.13</artifactId>
      <version>{escape(VERSION)}</version>
    </dependency>
    <dependency>
      <groupId>org.slf4j</groupId>
      <artifactId>slf4j-simple</artifactId>
      <version>{escape(_LOGGING)}</version>
    </dependency>
  </dependencies>
</project>
"""


def why_not_here() -> str | None:
    """Why Apache Kafka cannot run on this machine, or None where it can (perhaps after a download)."""
    java = shutil.which("java")
    if java is None:
        return "java is not on the PATH"
    version = _java_version(java)
    if version is None:
        return f"{java} does not tell its version"
    if version < _OLDEST_JAVA:
        return f"Apache Kafka needs Java {_OLDEST_JAVA}, and {java} is Java {version}"
    if cached_libraries() is None and shutil.which("mvn") is None:
        return f"mvn is not on the PATH, and Apache Kafka {VERSION} is not in the cache yet"
    return None


def find_java() -> Path:
    """The Java on the PATH. Raises ConfigurationError where there is none, or one that is too old."""
    java = shutil.which("java")
    version = _java_version(java) if java else None
    if java is None or version is None or version < _OLDEST_JAVA:
        raise ConfigurationError(
            f"Apache Kafka cannot run here: {why_not_here()}",
            hint=f"put a Java of version {_OLDEST_JAVA} or later on the PATH",
        )
    return Path(java)


def cached_libraries() -> Path | None:
    """The folder of the pinned broker's jars, or None as long as they have not been fetched."""
    for cache in _cache_folders():
        if (cache / _FOLDER).is_dir():
            return cache / _FOLDER
    return None


def libraries() -> Path:
    """The folder of the pinned broker's jars; Maven fetches them (about 45 MB) unless they are there.

    Processes that come at the same time wait for the first one's download. A download that was killed
    leaves nothing that looks usable. Raises ConfigurationError without a usable cache folder or mvn, and
    UnavailableError, with the end of Maven's output, when the download fails.
    """
    found = cached_libraries()
    if found is not None:
        return found
    cache = _writable_cache()
    with (cache / f"{_FOLDER}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        target = cache / _FOLDER
        if not target.is_dir():
            for abandoned in cache.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(abandoned, ignore_errors=True)
            unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=cache))
            try:
                _fetch(unfinished)
                (unfinished / "jars").rename(target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        return target


def _fetch(folder: Path) -> None:
    mvn = shutil.which("mvn")
    if mvn is None:
        raise ConfigurationError(
            f"Apache Kafka {VERSION} cannot be fetched: mvn is not on the PATH",
            hint="install Maven, or name a running broker in CRMCTL_KAFKA__BOOTSTRAP_SERVERS",
        )
    (folder / "pom.xml").write_text(_POM)
    command = [mvn, "--batch-mode", "--quiet", "--strict-checksums", "-Dstyle.color=never"]
    # A repository of its own, because the user's home may be missing or read-only. It goes with the folder.
    command += [f"-Dmaven.repo.local={folder / 'repository'}", f"{_PLUGIN}:copy-dependencies"]
    command += ["-DincludeScope=runtime", f"-DoutputDirectory={folder / 'jars'}"]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=_FETCH_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _failure(f"was not done after {_FETCH_SECONDS:.0f} seconds") from error
    except OSError as error:
        raise ConfigurationError(f"{mvn} cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-20:])
        raise _failure(f"failed (exit code {done.returncode}); its output ends with:\n{tail}")
    if not list((folder / "jars").glob(f"kafka_*-{VERSION}.jar")):
        raise _failure("succeeded without delivering the broker")


def _failure(what: str) -> UnavailableError:
    return UnavailableError(
        f"Fetching Apache Kafka {VERSION} with mvn {what}",
        hint="mvn needs Maven Central or a mirror of it; or name a broker in CRMCTL_KAFKA__BOOTSTRAP_SERVERS",
    )


def _cache_folders() -> Iterator[Path]:
    """Where the jars may be: the folder that is configured, or else the user's, then the temp folder's."""
    configured = os.environ.get("CRMCTL_CACHE_DIR")
    if configured:
        yield Path(configured).absolute()
        return
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if Path(shared).is_absolute():
        yield Path(shared, "crmctl")
    else:
        with contextlib.suppress(RuntimeError):  # an account without a home
            yield Path.home() / ".cache" / "crmctl"
    if _belongs_to_us(folder := _folder_in_temp()):
        yield folder


def _writable_cache() -> Path:
    for cache in _cache_folders():
        with contextlib.suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
            if os.access(cache, os.W_OK | os.X_OK):
                return cache
    cache = _folder_in_temp()
    if not os.environ.get("CRMCTL_CACHE_DIR"):
        with contextlib.suppress(OSError):
            cache.mkdir(mode=0o700)
            return cache
    raise ConfigurationError(
        "There is no folder to keep Apache Kafka in: neither CRMCTL_CACHE_DIR nor the user's cache is writable",
        hint="set CRMCTL_CACHE_DIR to a folder that you can write to",
    )


def _folder_in_temp() -> Path:
    return Path(tempfile.gettempdir()) / f"crmctl-cache-{os.geteuid()}"


def _belongs_to_us(folder: Path) -> bool:
    """Whether nobody else could have put the jars there that we are about to run."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return folder.is_dir() and not folder.is_symlink() and found.st_uid == os.geteuid() and not found.st_mode & 0o022


@functools.cache
def _java_version(java: str) -> int | None:
    """The major version of a Java program, or None if it does not run."""
    try:
        said = subprocess.run(
            [java, "-version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', said.stderr + said.stdout)
    return int(found[1]) if found and said.returncode == 0 else None
