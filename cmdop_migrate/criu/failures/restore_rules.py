"""List the known failures of a restore, and of both dump and restore: files, mounts, network, the host, images and
pages."""

from __future__ import annotations

from cmdop_migrate.criu.failures.rule import SAME_FILES, VERIFY, Rule, rule

RESTORE_RULES: tuple[Rule, ...] = (
    # Files on restore
    rule(
        "build_id",
        r"File (\S+) has bad build-ID",
        "/{0} is a different build here than on the host where the session was dumped",
        SAME_FILES,
    ),
    rule(
        "file_size",
        r"File (\S+) has bad size (\d+) \(expect (\d+)\)",
        "/{0} has {1} bytes here and had {2} when the session was dumped",
        SAME_FILES,
    ),
    rule(
        "file_mode",
        r"File (\S+) has bad mode (\d+) \(expect (\d+)\)",
        "/{0} has mode {1} here and had {2} when the session was dumped",
        SAME_FILES,
    ),
    rule(
        "file_missing", r"Can't open file (\S+)(?: on restore)?: No such file", "/{0} does not exist here", SAME_FILES
    ),
    rule("cwd", r"Can't open cwd", "the working directory of a process does not exist here", SAME_FILES),
    # Mounts and network
    rule(
        "mount_root",
        r"mnt: \d+:\.?(\S+) doesn't have a proper root mount",
        "{0} is a mount of the host that is not among the session's shares",
        "Unmount it inside the session, or start sessions with `--share` for it.",
    ),
    rule(
        "mount_mapping",
        r"No mapping for (\S+) mountpoint|Failed to open_tree (\S+):",
        "a folder that the session shares with its host does not exist ({0}{1})",
        "Create it on this host, then restore again.",
    ),
    rule(
        "mount_fs",
        r"mnt: (?:FS mnt|Unsupported|Mount) .*(?:unsupported|dev .* unsupported id|is not supported)|failed to dump fs",
        "a filesystem is mounted in the session that CRIU cannot dump",
        "Unmount it inside the session.",
    ),
    rule(
        "mount",
        r"mnt(?:-v2)?: Can't (?:mount|bind-mount|remount)(?: at)? ?(\S*)",
        "a mount of the session could not be restored ({0})",
        "See the log; the filesystem may be missing on this host.",
    ),
    rule(
        "link_taken",
        r"Can't restore link: -17|reported by netlink: File exists",
        "a network interface of the same name exists already",
        "Remove the left-over interface (`ip link del NAME`), then restore again.",
    ),
    rule(
        "link",
        r"net: Can't restore link: (-\d+)",
        "a network interface could not be restored ({0})",
        "Run `cmdop-migrate doctor`.",
    ),
    rule(
        "address",
        r"Can't bind.*(?:Cannot assign requested address|Address already in use)",
        "the address of a socket is in use or does not exist on this host",
        "With --net host, free the port on this host first; or run sessions in a private network.",
    ),
    # The machine
    rule(
        "pid_taken",
        r"Can't fork for (\d+): File exists|Pid (\d+) do not match expected",
        "pid {0}{1} of the session is used by another process",
        "End the process that has it, or restore on another host.",
    ),
    rule(
        "cpu",
        r"cpu: .*(?:not supported on host|do not match|does not match)|instruction capabilities do not match",
        "this CPU lacks features the session may already use",
        "Restore on a host whose CPU has at least the features of the first host.",
    ),
    rule(
        "no_space",
        r"No space left on device|Disk quota exceeded",
        "there is no space left for the images",
        "Free space where state_dir is, then try again.",
    ),
    rule(
        "no_memory",
        r"Cannot allocate memory|Out of memory",
        "memory ran out",
        "Free memory on this host, then try again.",
    ),
    rule(
        "too_many_files",
        r"Too many open files",
        "CRIU ran out of file descriptors",
        "Raise `ulimit -n` for cmdop-migrate.",
    ),
    rule(
        "apparmor",
        r"(?:apparmor|lsm|selinux).*(?:[Cc]an't|[Ff]ailed|not found|mismatch)",
        "the security profile (AppArmor, SELinux) of the session is missing, or refuses",
        "Load the same profile on this host.",
    ),
    # Images and pages
    rule(
        "page_server",
        r"Can't write pages to socket|The page server doesn't answer|Can't send PSI",
        "the receiver of the memory pages failed before CRIU had sent all of them",
        "See above why it failed; then try again.",
    ),
    rule(
        "lazy_socket",
        r"connect to lazy-pages\.socket failed",
        "the process that serves memory on demand is not running",
        "Restore again.",
    ),
    rule(
        "lazy_lost",
        r"Remote side closed connection|Error reading data from page server",
        "the source of the memory pages ended before all pages were in place",
        "The checkpoint is intact: restore it again.",
    ),
    rule(
        "uffd",
        r"(?:Lazy pages are not available|Unable to open an userfaultfd)",
        "this kernel does not allow filling memory on demand (userfaultfd)",
        "Restore without --lazy.",
    ),
    rule(
        "image_missing",
        r"Unexpected EOF on \(empty-image\)|Can't open (?:image|file) (\S+\.img)|Can't open dir",
        "an image file is missing",
        VERIFY,
    ),
    rule(
        "image_damaged",
        r"[Mm]agic doesn't match|Read \d+ bytes while \d+ expected|Unexpected EOF|Failed unpacking",
        "an image file is damaged",
        VERIFY,
    ),
    rule(
        "pages_missing", r"Can't read pages data|no pagemap covers", "memory pages are missing from the images", VERIFY
    ),
    rule(
        "permission",
        r"(?:Permission denied|Operation not permitted)",
        "this host does not permit an operation of CRIU",
        "Run `cmdop-migrate doctor`; in a container, give it more capabilities.",
    ),
)
