//! What `--help` and the man page of each command say at their end: exit codes and examples. One table has both.

use std::fmt::Write as _;

use clap::{Command, CommandFactory};

use super::bench::PATHS;
use super::{Cli, groups};
use crate::bench::about::about;

/// The end of one command's help.
pub struct Ending {
    /// The words of the command behind `spile`; empty for `spile` itself.
    pub command: &'static str,
    /// Exit codes besides those of [`COMMON`], which every command has.
    pub codes: &'static [Code],
    /// Command lines, and what each does.
    pub examples: &'static [(&'static str, &'static str)],
    /// What else there is to say, in paragraphs whose lines are broken already.
    pub notes: &'static [&'static str],
}

type Code = (&'static str, &'static str);

/// The exit codes of every command.
const COMMON: [Code; 3] =
    [("0", "success"), ("1", "failure"), ("2", "wrong usage: this makes no sense, or not for this disk")];

/// The codes of a program that Ctrl-C or SIGTERM ends.
const ENDED: Code = ("130, 143", "ended by SIGINT (Ctrl-C) or SIGTERM");
const ENDED_AT_ONCE: Code = ("130, 143", "ended at once by a second SIGINT or SIGTERM");

const SIZES: &str = "\
Sizes are binary: 20G = 20GiB = 20 GiB. 20GB is refused, as it means two things.";

const FORMATS: &str = "\
A disk's format is --format, or what its extension says (.vhd, .avhd, .vpc;
.raw, .img; .qcow2). It is never guessed from the content, which a guest could
forge.";

const JSON: &str = "\
With --json, stdout has the answer and nothing else. An error is one JSON object
in one line on stderr, in the place of the text. The same thing has the same
name everywhere, and the names of numbers end in their unit.";

/// The widest line of a terminal that is not wide.
const COLUMNS: usize = 80;

/// One entry for each command that `--help` lists.
pub const ENDINGS: &[Ending] = &[
    Ending {
        command: "",
        codes: &[
            ("1", "compare: the content differs"),
            ("2", "compare: failure"),
            ("3", "check, verify: corruption found; load, demo: data read back wrong"),
            ("4", "check: nothing wrong but leaked space"),
            ("130, 143", "ended by SIGINT (Ctrl-C) or SIGTERM; servers: by a second one"),
        ],
        examples: &[
            ("spile create disk.vhd --size 20G", "a thin disk of 20 GiB"),
            ("spile serve disk.vhd --vhost-user disk.sock --nbd unix:disk.nbd", "for a guest and for NBD clients"),
        ],
        notes: &[SIZES, FORMATS, JSON],
    },
    Ending {
        command: "create",
        codes: &[],
        examples: &[
            ("spile create disk.vhd --size 20G", "a thin disk of 20 GiB"),
            ("spile create child.vhd --parent disk.vhd", "a snapshot: disk.vhd is only read from now on"),
            ("spile create disk.raw --size 1.5T", "a raw disk; the file is sparse"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "info",
        codes: &[],
        examples: &[
            ("spile info disk.vhd", "what the image says of itself"),
            ("spile info child.vhd --chain --json", "the same of its parents, for a program"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "map",
        codes: &[],
        examples: &[("spile map disk.vhd", "where the disk's bytes lie")],
        notes: &[JSON],
    },
    Ending {
        command: "check",
        codes: &[
            ("1", "failure, or a file that the disk needs cannot be opened"),
            ("3", "corruption found, or the file is cut short"),
            ("4", "nothing wrong but leaked space"),
        ],
        examples: &[
            ("spile check disk.vhd", "look only"),
            ("spile check disk.vhd --repair", "mend what can be mended without a loss"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "convert",
        codes: &[ENDED],
        examples: &[
            ("spile convert disk.vhd copy.raw", "the same disk as a raw file; holes stay holes"),
            ("spile convert disk.raw nbd://host/export", "onto an export that is there already"),
            ("spile convert disk.vhd /dev/vg/lv --to raw --onto", "onto a block device; all on it is lost"),
            ("spile convert - disk.vhd --size 20G", "raw bytes from a pipe, such as that of `xz -dc`"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "compare",
        codes: &[("0", "the disks read the same"), ("1", "they differ"), ("2", "failure, or wrong usage")],
        examples: &[("spile compare disk.vhd copy.raw", "does the copy read as the disk does?")],
        notes: &[JSON],
    },
    Ending {
        command: "measure",
        codes: &[],
        examples: &[
            ("spile measure disk.raw --to vhd", "how long disk.raw would be as a VHD"),
            ("spile measure --size 20G --to raw", "the same for an empty disk of that size"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "serve",
        codes: &[ENDED_AT_ONCE],
        examples: &[
            ("spile serve disk.vhd --vhost-user disk.sock", "for a virtual machine"),
            ("spile serve a.vhd b.raw,name=data --nbd tcp:localhost:10809", "two disks for NBD clients"),
            ("spile serve a.vhd --nbd unix:a.nbd --control a.control --takeover", "in the place of a running server"),
        ],
        notes: &[],
    },
    Ending {
        command: "ls",
        codes: &[],
        examples: &[("spile ls", "every disk that is served on this host")],
        notes: &[JSON],
    },
    Ending {
        command: "show",
        codes: &[],
        examples: &[("spile show disk", "images, ways, latencies of the disk of that name")],
        notes: &[JSON],
    },
    Ending {
        command: "stat",
        codes: &[ENDED],
        examples: &[
            ("spile stat disk", "one second of the disk of that name"),
            ("spile stat disk --layers --interval 10", "queues and latencies from the front to the device"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "top",
        codes: &[ENDED],
        examples: &[
            ("spile top", "all disks of this host, in the terminal"),
            ("spile top --batch iostat --interval 5", "columns as those of iostat -xm"),
            ("spile top --json --count 10", "ten seconds for a program"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "slow",
        codes: &[],
        examples: &[
            ("spile slow disk", "the slowest requests of the last two minutes"),
            ("spile slow disk --json", "the same for programs; what hangs now is `in_flight`"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "events",
        codes: &[],
        examples: &[
            ("spile events", "what has happened to the disks of this host"),
            ("spile events disk --follow --json", "for a program that is to act: a line for each event, as it comes"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "trace",
        codes: &[],
        examples: &[
            ("spile trace disk --for 10s", "where the time of its requests goes"),
            ("spile trace disk --for 1s --out trace.json", "and all of them for ui.perfetto.dev"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "attach",
        codes: &[],
        examples: &[("spile attach disk data.vhd --vhost-user data.sock", "the server of `disk` serves data.vhd, too")],
        notes: &[],
    },
    Ending {
        command: "detach",
        codes: &[],
        examples: &[
            ("spile detach data", "closes the disk"),
            ("spile detach data --force", "also while it is used, or has a job"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "resize",
        codes: &[],
        examples: &[
            ("spile resize disk 40G", "the disk of that name; its guest sees it at once"),
            ("spile resize disk.vhd 40G", "a disk that is not served, raw or VHD"),
            (
                "spile resize disk.vhd 10G --shrink",
                "cuts off zeroes behind the first 10 GiB; refuses if there are data",
            ),
            ("spile resize disk.vhd 10G --shrink --discard", "cuts off what lies behind the first 10 GiB"),
        ],
        notes: &[],
    },
    Ending {
        command: "coalesce",
        codes: &[ENDED],
        examples: &[
            ("spile coalesce disk", "the disk's own image goes into its parent"),
            ("spile coalesce disk --layer monday", "the snapshot monday goes into its parent"),
            ("spile coalesce disk.vhd --rate 50M", "50 MiB in a second at most"),
            ("spile coalesce disk --background", "returns at once; `spile jobs` shows how far it is"),
        ],
        notes: &[],
    },
    Ending {
        command: "flatten",
        codes: &[ENDED],
        examples: &[("spile flatten disk", "afterwards the disk needs no parent")],
        notes: &[],
    },
    Ending {
        command: "move",
        codes: &[ENDED],
        examples: &[
            ("spile move disk --to /new/array", "its guest goes on, and does not notice"),
            ("spile move disk --to /new/array/disk.raw --rate 200M", "as a raw image, 200 MiB in a second at most"),
            ("spile move disk --to nbds://host2/vm1.vhd", "to another host, where spile receive takes it in"),
            (
                "spile move disk.vhd --to /new/array --delete-source",
                "a disk that no server has; only a note stays behind",
            ),
        ],
        notes: &["\
Until the disk is handed over, Ctrl-C and `spile job ID cancel` leave it where
it is. With --background the command returns at once, and so it does with
--mirror-only, whose copy ends only when `spile job ID finish` says so."],
    },
    Ending {
        command: "receive",
        codes: &[ENDED],
        examples: &[
            (
                "spile receive /vm --nbd tcp:[::]:10809 --tls-cert c --tls-key k --tls-ca ca",
                "takes disks in from hosts with a certificate",
            ),
            ("spile receive /vm --list", "what has come, and what is half there"),
        ],
        notes: &[JSON],
    },
    Ending { command: "jobs", codes: &[], examples: &[("spile jobs", "the jobs of this host")], notes: &[JSON] },
    Ending {
        command: "job",
        codes: &[],
        examples: &[
            ("spile job 4711-1 pause", "has it wait"),
            ("spile job 4711-1 rate 20M", "20 MiB in a second at most"),
            ("spile job 4711-1 finish", "a copy of spile move --mirror-only comes to its end"),
            ("spile job 4711-1 hand-over", "the same, for a guest that goes on at the host of the copy"),
            ("spile job 4711-1 cancel", "ends it; the disk is where it was"),
            ("spile job disk.vhd cancel", "gives up what was broken off, of a disk that nobody serves"),
        ],
        notes: &[],
    },
    Ending {
        command: "backup",
        codes: &[ENDED],
        examples: &[
            ("spile backup disk /backup/monday.vhd", "a disk of a server, whose guest goes on"),
            ("spile backup boot data /backup/monday", "two disks of a server, of one moment, in a folder"),
            ("spile backup disk nbds://backup.example/monday --manifest m.json", "on an export of another host"),
            ("spile backup disk sun.vhd --checkpoint sunday", "in full; the moment has a name"),
            ("spile backup disk mon.vhd --since sunday --parent sun.vhd", "what has changed since"),
            ("spile backup disk.vhd disk.raw", "a disk that no server has"),
            ("spile backup disk latest.vhd --overwrite", "in the place of an older one"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "verify",
        codes: &[("3", "the backup differs from its digests")],
        examples: &[("spile verify /backup/monday.vhd", "reads all of it")],
        notes: &[JSON],
    },
    Ending {
        command: "restore",
        codes: &[],
        examples: &[
            ("spile restore /backup/monday.vhd disk.vhd", "a new disk"),
            ("spile restore /backup/monday.vhd disk.vhd --onto", "over a disk that is there"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "snapshot",
        codes: &[],
        examples: &[
            ("spile snapshot disk --name monday", "monday.vhd holds what the disk holds now"),
            (
                "spile snapshot disk data --name monday",
                "two disks of a server at one point in time: disk-monday, data-monday",
            ),
            ("spile snapshot disk.vhd --name monday --json", "a disk that nobody serves"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "clone",
        codes: &[],
        examples: &[
            ("spile clone golden.vhd vm7.vhd", "a disk for one more virtual machine"),
            ("spile clone disk test.vhd", "of a disk in use: a snapshot of it is test.vhd's parent"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "revert",
        codes: &[],
        examples: &[
            ("spile revert disk.vhd monday.vhd --discard", "loses what was written since"),
            ("spile revert disk.vhd monday.vhd --keep tuesday", "tuesday.vhd is what the disk held"),
            ("spile revert disk monday --keep tuesday", "the same by names, of a disk that is served"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "rebase",
        codes: &[("1", "failure; with --check: it would not read the same")],
        examples: &[
            ("spile rebase vm.vhd --parent copy-of-base.vhd --check", "would it read the same?"),
            ("spile rebase vm.vhd --parent new-base.vhd --copy", "has its own copy of what differs"),
            ("spile rebase vm.vhd --parent base-1.vhd --trust", "the parent has moved"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "amend",
        codes: &[],
        examples: &[
            ("spile amend vm.qcow2 --compat 1.1", "version 3, which most options need"),
            ("spile amend vm.qcow2 --lazy-refcounts off", "other programs keep its refcounts up from now on"),
            ("spile amend vm.qcow2 -o compat=0.10", "version 2, for programs from before 2013"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "delete",
        codes: &[],
        examples: &[
            ("spile delete old.vhd", "an image that no other one needs"),
            ("spile delete monday.vhd", "a snapshot with one child: it goes with the next spile gc"),
            ("spile delete monday.vhd --undo", "keeps it after all, if gc has not begun with it"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "internal-snapshot",
        codes: &[],
        examples: &[
            ("spile internal-snapshot disk.qcow2 --list", "as qemu-img snapshot -l"),
            ("spile internal-snapshot disk.qcow2 --create monday", "keeps what the disk holds, in its own file"),
            ("spile internal-snapshot disk.qcow2 --apply monday", "loses what the disk holds now"),
            ("spile internal-snapshot disk.qcow2 --delete monday", "gives its space back"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "gc",
        codes: &[("1", "not all that was begun could be done; else: failure")],
        examples: &[
            ("spile gc /vm --dry-run", "what there is to do in a folder"),
            ("spile gc /vm --rate 50M", "does it; each disk moves 50 MiB in a second at most"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "checkpoint",
        codes: &[],
        examples: &[
            ("spile checkpoint disk monday", "from now on it is known what changes"),
            ("spile checkpoint disk monday --remove", "what has changed since earlier ones stays known"),
            ("spile checkpoint disk --list", "with how much has changed since each"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "changed",
        codes: &[],
        examples: &[
            ("spile changed disk --since monday", "the ranges that may have changed, and their sum"),
            ("spile changed disk.vhd --since monday --json", "of a disk that nobody serves, for programs"),
            ("spile changed disk --since monday --cbtlog monday.cbtlog", "for tools of XenServer"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "tree",
        codes: &[],
        examples: &[
            ("spile tree /vm", "all images of a folder, each under its parent"),
            ("spile tree disk --json", "the family of a disk, for programs"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "on-error",
        codes: &[],
        examples: &[
            ("spile on-error disk pause", "from now on requests wait for space"),
            ("spile on-error disk report", "requests that wait are reported as failed"),
        ],
        notes: &[],
    },
    Ending {
        command: "shape",
        codes: &[],
        examples: &[
            ("spile shape disk split=128k", "larger requests go to the storage in parts of 128 KiB"),
            ("spile shape disk auto", "learns what pays"),
            ("spile shape disk", "says what is done now, and what `auto` has learned"),
        ],
        notes: &[],
    },
    Ending {
        command: "limit",
        codes: &[],
        examples: &[
            ("spile limit disk --iops 500 --bps 50M", "at most 500 requests and 50 MiB in a second"),
            ("spile limit disk --write-bps 0", "no limit of its own on bytes written any more"),
            ("spile limit disk --group gold", "shares the limits of a group with other disks"),
            ("spile limit disk --whole-group --iops 9000", "what its group may do together"),
            ("spile limit disk", "says what holds now"),
        ],
        notes: &[],
    },
    Ending {
        command: "pause",
        codes: &[],
        examples: &[
            ("spile pause disk", "any program can copy its files now"),
            ("spile pause disk --at-most 10s", "the guest waits for ten seconds at most"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "resume",
        codes: &[("1", "failure; this pause was over before: copy again")],
        examples: &[
            ("spile resume disk --pause 1f0c2a9b7e35", "ends that pause: the copy is good"),
            ("spile resume disk", "tries at once what waits for trouble to pass"),
        ],
        notes: &[],
    },
    Ending {
        command: "accept-loss",
        codes: &[("1", "failure; flushes still fail, because of a parent")],
        examples: &[
            ("spile accept-loss disk", "flushes of the disk of that name succeed again"),
            ("spile accept-loss /srv/disk.vhd", "the same while nobody serves it"),
            ("spile accept-loss nbd://host/export", "the same for an NBD export"),
        ],
        notes: &[],
    },
    Ending {
        command: "xen-lab",
        codes: &[],
        examples: &[("spile xen-lab lab", "a Xen in the folder lab, until it is ended")],
        notes: &[],
    },
    Ending {
        command: "xen-backend",
        codes: &[ENDED_AT_ONCE],
        examples: &[
            ("spile xen-backend", "serves the disks that the toolstack makes"),
            ("spile xen-backend --lab lab --run-dir lab/run", "the same on the Xen of `spile xen-lab lab`"),
        ],
        notes: &[],
    },
    Ending {
        command: "load",
        codes: &[("3", "data read back wrong"), ENDED],
        examples: &[
            ("spile load nbd+unix:///?socket=disk.nbd --rw randrw --verify", "over NBD; destroys what is on the disk"),
            ("spile load vhost-user:disk.sock --depth 32 --runtime 30s", "as a guest, reading"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "bench",
        codes: &[],
        examples: &[("spile bench paths --quick", "what each way to a guest's memory costs")],
        notes: &[PATHS],
    },
    Ending {
        command: "bench all",
        codes: &[("1", "failure; or an experiment failed, and the others ran")],
        examples: &[
            ("spile bench all --quick", "all of it in five minutes"),
            ("spile bench all --out results --folder /srv", "goes on where it was interrupted"),
        ],
        notes: &[],
    },
    Ending {
        command: "bench depth",
        codes: &[],
        examples: &[
            ("spile bench depth --quick", "a short run"),
            ("spile bench depth --delay 1ms --folder /srv --out o", "drawn, with a file in /srv"),
        ],
        notes: &[],
    },
    Ending {
        command: "bench shape",
        codes: &[],
        examples: &[
            ("spile bench shape --quick", "a short run"),
            ("spile bench shape --store /dev/nvme0n1 --out o", "drawn, with a device of this host, which is only read"),
        ],
        notes: &[],
    },
    Ending {
        command: "bench density",
        codes: &[],
        examples: &[
            ("spile bench density --quick --guests", "a short run"),
            ("spile bench density --disks 100 --seconds 60", "two rows of 30 seconds"),
        ],
        notes: &[],
    },
    Ending {
        command: "bench layers",
        codes: &[],
        examples: &[
            ("spile bench layers --quick", "a short run"),
            ("spile bench layers --place file --way bare --way nbd", "without root"),
        ],
        notes: &[],
    },
    Ending {
        command: "bench geometry",
        codes: &[],
        examples: &[
            ("spile bench geometry --quick", "a short run"),
            ("spile bench geometry /dev/sdb --every 5G", "a whole disk, which is only read"),
        ],
        notes: &[],
    },
    Ending {
        command: "bench warmup",
        codes: &[],
        examples: &[("spile bench warmup --quick", "a short run"), ("spile bench warmup --size 1G", "up to 1 GiB")],
        notes: &[],
    },
    Ending {
        command: "bench paths",
        codes: &[],
        examples: &[("spile bench paths --quick", "a short run")],
        notes: &[],
    },
    Ending {
        command: "bench aggregate",
        codes: &[],
        examples: &[("spile bench aggregate --quick --out plots", "a short run, drawn")],
        notes: &[],
    },
    Ending {
        command: "bench snapshot",
        codes: &[],
        examples: &[
            ("spile bench snapshot --quick", "a short run"),
            (
                "spile bench snapshot --disks 16 --chain 30 --folder /srv --out o",
                "one case, drawn, with images in /srv",
            ),
        ],
        notes: &[],
    },
    Ending {
        command: "bench merge",
        codes: &[],
        examples: &[
            ("spile bench merge --quick", "a short run"),
            ("spile bench merge --size 4G --folder /srv --out o", "drawn, with a larger disk in /srv"),
        ],
        notes: &[],
    },
    Ending {
        command: "bench crowd",
        codes: &[],
        examples: &[("spile bench crowd --quick", "a short run")],
        notes: &[],
    },
    Ending {
        command: "bench hung",
        codes: &[],
        examples: &[("spile bench hung --quick", "a short run"), ("spile bench hung --engine aio", "with Linux AIO")],
        notes: &[],
    },
    Ending {
        command: "bench limit",
        codes: &[],
        examples: &[
            ("spile bench limit --quick", "a short run"),
            ("spile bench limit --rounds 20", "on a busy machine"),
        ],
        notes: &[],
    },
    Ending {
        command: "bench checkpoint",
        codes: &[],
        examples: &[
            ("spile bench checkpoint --quick", "a short run"),
            ("spile bench checkpoint --folder /vm", "with the storage's part in each write"),
        ],
        notes: &[],
    },
    Ending {
        command: "bench promises",
        codes: &[],
        examples: &[
            ("spile bench promises --quick", "a short run"),
            ("spile bench promises --only mirror --only link-cut --cut 10m --folder /vm", "two lines, in /vm"),
        ],
        notes: &[],
    },
    Ending {
        command: "bench exchange",
        codes: &[],
        examples: &[("spile bench exchange --quick", "a short run")],
        notes: &[],
    },
    Ending {
        command: "report",
        codes: &[],
        examples: &[
            ("spile report results -o report.html", "one page of what `spile bench … --out results` wrote"),
            ("spile report --live a", "a page of the server that has the disk `a`"),
        ],
        notes: &[],
    },
    Ending {
        command: "tune",
        codes: &[],
        examples: &[
            ("spile tune /dev/nvme0n1", "reads a device for a minute; nothing is written to it"),
            ("spile tune /srv --write --out o", "writes to a file of its own in /srv, drawn"),
        ],
        notes: &[JSON],
    },
    Ending {
        command: "demo",
        codes: &[("3", "data read back wrong, or the disk is corrupt"), ENDED],
        examples: &[("spile demo --seconds 5", "a short one, in a temporary folder")],
        notes: &[JSON],
    },
    Ending {
        command: "schema",
        codes: &[],
        examples: &[
            ("spile schema info", "what `spile info --json` prints"),
            ("spile schema bench paths", "the same for a command of two words"),
            ("spile schema api", "the control API, as an OpenAPI document"),
        ],
        notes: &[],
    },
    Ending {
        command: "completions",
        codes: &[],
        examples: &[("spile completions bash", "write this to a file that bash reads")],
        notes: &[],
    },
    Ending {
        command: "man",
        codes: &[],
        examples: &[("spile man man1", "then: man -l man1/spile-serve.1")],
        notes: &[],
    },
];

/// The whole command line, with what its help says at the end.
pub fn command() -> Command {
    groups::grouped(with_endings(Cli::command().term_width(COLUMNS), ""), COLUMNS)
}

/// The end of the help of the command `words`, if that is in the table.
pub fn ending(words: &str) -> Option<&'static Ending> {
    ENDINGS.iter().find(|ending| ending.command == words)
}

fn with_endings(command: Command, words: &str) -> Command {
    let names: Vec<String> = command.get_subcommands().map(|inner| inner.get_name().to_owned()).collect();
    let command = names.iter().fold(command, |command, name| {
        let inner = if words.is_empty() { name.clone() } else { format!("{words} {name}") };
        command.mut_subcommand(name, |command| with_endings(command, &inner))
    });
    match ending(words) {
        Some(ending) => command.after_help(with_about(ending)),
        None => command,
    }
}

/// The end of a command's help; before it what is told of the experiment, if the command is one.
fn with_about(ending: &Ending) -> String {
    let experiment = ending.command.strip_prefix("bench ").and_then(about);
    let told = experiment.map(|about| format!("What it shows:\n{}\n\n", about.to_text(COLUMNS)));
    told.unwrap_or_default() + &ending.to_text()
}

impl Ending {
    /// All exit codes, each once or, where one means several things, several times.
    pub fn codes(&self) -> Vec<Code> {
        let replaced = |code: &&Code| self.command.is_empty() || self.codes.iter().all(|own| own.0 != code.0);
        let mut codes: Vec<_> = COMMON.iter().filter(replaced).chain(self.codes).copied().collect();
        codes.sort_by_key(|(code, _)| (code.len(), *code));
        codes
    }

    fn to_text(&self) -> String {
        let mut text = String::from("Exit codes:\n");
        // Writing to a string cannot fail.
        for (code, meaning) in self.codes() {
            let _ = writeln!(text, "  {code:<8}  {meaning}");
        }
        text.push_str("\nExamples:\n");
        for (line, what) in self.examples {
            let _ = writeln!(text, "  {line}\n          {what}");
        }
        for note in self.notes {
            let _ = writeln!(text, "\n{note}");
        }
        text.trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn visible(command: &Command, words: &str, into: &mut Vec<String>) {
        into.push(words.to_owned());
        for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set() && inner.get_name() != "help") {
            let name = inner.get_name();
            visible(inner, format!("{words} {name}").trim(), into);
        }
    }

    #[test]
    fn every_command_has_exit_codes_and_examples_and_no_other_has() {
        let mut commands = Vec::new();
        visible(&command(), "", &mut commands);
        let mut in_table: Vec<_> = ENDINGS.iter().map(|ending| ending.command.to_owned()).collect();
        commands.sort();
        in_table.sort();
        assert_eq!(commands, in_table);
        assert!(ENDINGS.iter().all(|ending| !ending.examples.is_empty()));
    }

    #[test]
    fn every_example_is_a_command_line_of_its_command() {
        for ending in ENDINGS {
            for (line, _) in ending.examples {
                assert!(line.starts_with(format!("spile {}", ending.command).trim()), "{line}");
                if let Err(error) = command().try_get_matches_from(line.split(' ')) {
                    panic!("{line}: {error}");
                }
            }
        }
    }

    #[test]
    fn the_end_of_each_help_fits_a_terminal() {
        for ending in ENDINGS {
            for line in with_about(ending).lines() {
                assert!(line.chars().count() <= COLUMNS, "{}: {line}", ending.command);
            }
        }
    }
}
