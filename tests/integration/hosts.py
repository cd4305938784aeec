"""Two hosts made of one machine: network, mount, host-name and process namespaces of their own, with real ssh and pdsh.

Needs root, ip, unshare, nsenter, ssh, and sshd with pdsh: installed, or unpacked below the folder that
DFLASH_TEST_SSH_ROOT names (``apt-get download openssh-server pdsh libwrap0 libgenders0``, then ``dpkg -x`` each). The
two share the file system, as hosts share a network folder; /dev/shm, /run and process ids are their own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

ADDRESSES = {"node-a": "10.77.0.1", "node-b": "10.77.0.2"}
SSH_ROOT = os.environ.get("DFLASH_TEST_SSH_ROOT", "")


def missing() -> str | None:
    """Why two hosts cannot be made here, or None."""
    if os.geteuid() != 0:
        return "needs root"
    tools = [tool for tool in ("ip", "unshare", "nsenter", "ssh", "ssh-keygen") if shutil.which(tool) is None]
    servers = [] if SSH_ROOT else [tool for tool in ("/usr/sbin/sshd", "/usr/bin/pdsh") if not Path(tool).exists()]
    return f"needs {', '.join(tools + servers)}" if tools or servers else None


# $1 host name, $2 work folder, $3 unpacked packages or ""; then what runs on the host.
INSIDE = """
set -e
mount --make-rprivate /
hostname "$1"; work=$2; extra=$3; shift 3
mount -t proc proc /proc
mount -t tmpfs -o size=1g tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd /run/etc /run/upper /run/work
cp /etc/passwd /run/etc/passwd
grep -q ^sshd: /run/etc/passwd || echo 'sshd:x:74:65534::/run/sshd:/usr/sbin/nologin' >> /run/etc/passwd
mount --bind /run/etc/passwd /etc/passwd
mount --bind $work/hosts /etc/hosts
mkdir -p /run/etc/ssh; cp $work/ssh_config /run/etc/ssh/ssh_config; mount --bind /run/etc/ssh /etc/ssh
[ -z "$extra" ] || mount -t overlay overlay -o lowerdir=$extra/usr:/usr,upperdir=/run/upper,workdir=/run/work /usr
exec "$@"
"""


class Hosts:
    """``node-a`` and ``node-b``. Use as a context; everything is gone afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._mark = folder, f"dflash{os.getpid()}"
        self._servers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Hosts:
        try:
            self._write_files()
            self._make_network()
            for host in ADDRESSES:
                self._servers[host] = self._start(host)
            deadline = time.monotonic() + 20
            while any(self._namespace(host) is None for host in ADDRESSES):
                assert time.monotonic() < deadline, "no sshd"
                time.sleep(0.1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.kill()  # --kill-child takes the host's init along, and with it all its processes
            server.wait()
        for host in ADDRESSES:
            subprocess.run(["ip", "netns", "del", self._netns(host)], check=False, capture_output=True)

    def run(self, host: str, command: list[str], output: Path, cwd: Path) -> subprocess.Popen[bytes]:
        """Start a command on a host."""
        with open(output, "wb") as file:
            return subprocess.Popen(
                [*self._enter(host), *command], cwd=cwd, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip

    def ranks(self, host: str) -> dict[int, int]:
        """Local rank -> pid (as seen from outside) of the ranks on a host."""
        space = self._namespace(host)
        found: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode(errors="replace").split("\0")
                here = os.readlink(path.parent / "ns" / "pid") == os.readlink(f"/proc/{space}/ns/pid")
            except OSError:
                continue
            local = next((word.split("=")[1] for word in words if word.startswith("--local_rank=")), None)
            if here and local is not None:
                found[int(local)] = int(path.parent.name)
        return found

    def shm(self, host: str) -> str:
        """What lies in the host's /dev/shm."""
        listed = subprocess.run([*self._enter(host), "ls", "/dev/shm"], capture_output=True, text=True, check=True)
        return listed.stdout.strip()

    def _enter(self, host: str) -> list[str]:
        return ["nsenter", "-t", str(self._namespace(host)), "-m", "-u", "-p", "-n", "--wd=" + os.getcwd()]

    def _netns(self, host: str) -> str:
        return f"{self._mark}-{host}"

    def _namespace(self, host: str) -> int | None:
        """Pid of the host's sshd, the init of its namespaces."""
        outer = self._servers[host].pid
        children = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
        if not children or b"sshd" not in Path(f"/proc/{children[0]}/cmdline").read_bytes():
            return None
        return int(children[0])

    def _start(self, host: str) -> subprocess.Popen[bytes]:
        log = open(self.folder / f"{host}.log", "wb")  # noqa: SIM115
        command = ["ip", "netns", "exec", self._netns(host), "unshare", "-m", "-u", "-p", "-f", "--kill-child"]
        inside = ["sh", "-c", INSIDE, "host", host, str(self.folder), SSH_ROOT]
        server = ["/usr/sbin/sshd", "-D", "-f", str(self.folder / "sshd_config"), "-e"]
        return subprocess.Popen([*command, *inside, *server], stdout=log, stderr=log, start_new_session=True)

    def _make_network(self) -> None:
        first, second = (self._netns(host) for host in ADDRESSES)
        for name in (first, second):
            subprocess.run(["ip", "netns", "add", name], check=True)
        link = ["ip", "link", "add", "eth9", "netns", first, "type", "veth", "peer", "name", "eth9", "netns", second]
        subprocess.run(link, check=True)
        for name, address in zip((first, second), ADDRESSES.values(), strict=True):
            subprocess.run(["ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth9"], check=True)
            for device in ("lo", "eth9"):
                subprocess.run(["ip", "-n", name, "link", "set", device, "up"], check=True)

    def _write_files(self) -> None:
        at = self.folder
        for key in ("key", "hostkey"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(at / key)], check=True)
        shutil.copy(at / "key.pub", at / "authorized")
        names = "".join(f"{address} {host}\n" for host, address in ADDRESSES.items())
        (at / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (at / "ssh_config").write_text(
            f"Host *\n IdentityFile {at}/key\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n"
            " LogLevel ERROR\n"
        )
        (at / "sshd_config").write_text(
            f"HostKey {at}/hostkey\nAuthorizedKeysFile {at}/authorized\nStrictModes no\nUsePAM no\nPidFile none\n"
            "PermitRootLogin yes\n"
        )
        os.chmod(at, 0o755)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a command that was started by `Hosts.run`, and wait for it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
