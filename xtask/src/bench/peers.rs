//! The lines of `cargo xtask bench-peers`: few, on real files, and one picture of them.

use super::kinds::{Aio, Front, Kind, Role};
use super::lines::{Cache, Format, Group, Line, Side, State};
use super::picture::Picture;
use super::report::Report;
use super::{Plan, plan, run_groups};
use crate::{Result, shell};
use std::path::PathBuf;

const NBD: Kind = Kind::Spile(Front::Nbd);
const VHOST: Kind = Kind::Spile(Front::Vhost);
const DAEMON: Kind = Kind::Daemon(Aio::Uring);

/// Measures Spile beside qemu-nbd, nbdkit and qemu-storage-daemon, and draws it.
pub fn run(arguments: &[String]) -> Result<()> {
    let plan = plan(arguments, "peers-")?;
    let usual = plan.folder.join("peers.svg");
    let file: PathBuf = shell::option(arguments, "--svg", usual)?;
    let mut report = Report::new(&plan);
    let groups = groups(&plan);
    let heads: Vec<(&str, &str)> = groups.iter().map(|group| (group.name, group.about)).collect();
    let picture = Picture::new(&heads, &plan);
    run_groups(&plan, groups, &mut report)?;
    picture.write(report.results(), &file)?;
    report.finish(&plan)
}

fn groups(plan: &Plan) -> Vec<Group> {
    let read = || Line::new("randread", "4k", 32, 1);
    let write = || Line::new("randwrite", "4k", 32, 1);
    let first = || write().requests(plan, 20_000);
    let (page, direct) = (Cache::Page, Cache::Direct);
    let raw_nbd = vec![
        Side::new("spile", NBD, Format::Raw, page),
        Side::new("qemu-nbd", Kind::Qemu, Format::Raw, page),
        Side::new("nbdkit", Kind::Nbdkit, Format::Raw, page),
    ];
    let raw_guest = |cache| {
        vec![
            Side::new("spile", VHOST, Format::Raw, cache),
            Side::new("qemu-storage-daemon", DAEMON, Format::Raw, cache),
        ]
    };
    let thin = |state| {
        let sides = [
            Side::new("spile, VHD", VHOST, Format::Vhd, direct),
            Side::new("spile, qcow2", VHOST, Format::Qcow2, direct).role(Role::Shown),
            Side::new("qemu-storage-daemon, qcow2", DAEMON, Format::Qcow2, direct),
        ];
        sides.map(|side| side.state(state)).to_vec()
    };
    let group = |name, about, sides, lines| Group { name, about, sides, lines };
    vec![
        group("NBD, page cache", "a raw file", raw_nbd, vec![read(), write(), Line::new("read", "1m", 8, 1)]),
        group("vhost-user, page cache", "a raw file", raw_guest(page), vec![read(), write()]),
        group("vhost-user, O_DIRECT", "a raw file", raw_guest(direct), vec![read(), write()]),
        group("vhost-user, thin, O_DIRECT", "an image that is written", thin(State::Full), vec![read(), write()]),
        group("vhost-user, thin, first writes, O_DIRECT", "an empty image", thin(State::Fresh), vec![first()]),
    ]
}
