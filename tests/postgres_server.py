"""A real PostgreSQL server for tests: a private cluster on a free port.

PostgreSQL refuses to run as root. Under root it runs as the user that Debian created for it, or as an unprivileged
user."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from emberline.core.freeport import free_port


@dataclass(frozen=True, slots=True)
class Postgres:
    port: int
    data: Path
    tools: Path
    user: str | None  # to run as; None: ourselves

    def url(self, database: str) -> str:
        return f"postgresql://tester@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """Create an empty database and return its URL."""
        name = f"t{uuid4().hex}"
        asyncio.run(self._create(name))
        return self.url(name)

    async def _create(self, name: str) -> None:
        import asyncpg

        connection = await asyncpg.connect(self.url("postgres"))
        await connection.execute(f"CREATE DATABASE {name}")
        await connection.close()

    def control(self, *arguments: str) -> None:
        command = [str(self.tools / "pg_ctl"), "-D", str(self.data), "-w", "-t", "60", *arguments]
        subprocess.run(command, user=self.user, check=True, stdout=subprocess.DEVNULL, timeout=90, cwd="/")

    def stop(self, mode: str = "immediate") -> None:
        self.control("stop", "-m", mode)

    def start(self) -> None:
        settings = (
            f"-p {self.port} -k {self.data} -h 127.0.0.1 -c fsync=off -c full_page_writes=off -c shared_buffers=32MB"
        )
        self.control("start", "-l", str(self.data / "log"), "-o", settings)


def find_tools() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    named = shutil.which("initdb")
    return found[-1].parent if found else Path(named).parent if named else None


def start_postgres(tools: Path) -> Postgres:
    user = None
    home = Path(tempfile.mkdtemp(prefix="emberline-postgres-"))
    if os.getuid() == 0:
        names = {entry.pw_name for entry in pwd.getpwall()}
        user = "postgres" if "postgres" in names else "nobody"
        shutil.chown(home, user)
    server = Postgres(free_port(), home / "data", tools, user)
    initdb = [str(tools / "initdb"), "-D", str(server.data), "-U", "tester", "-A", "trust", "-E", "UTF8", "--no-sync"]
    subprocess.run([*initdb, "--locale=C"], user=user, check=True, stdout=subprocess.DEVNULL, timeout=90, cwd="/")
    server.start()
    return server


def stop_postgres(server: Postgres) -> None:
    server.stop()
    shutil.rmtree(server.data.parent)
