//! `spile amend`: another version of a qcow2 image, and lazy refcounts.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use spile_core::{Disk as _, Error, ErrorKind, Locator, Result};
use spile_image::amend::{Amended, Amendment, Revision};
use spile_image::layer::Layer as _;
use spile_image::{Format, OpenOptions};
use spile_life::snapshot::refuse_job;
use spile_server::checkpoints::Checkpoints;
use spile_server::jobs::Access;
use spile_store::{CacheMode, HostFiles, OsFiles};
use utoipa::ToSchema;

use super::options::{parse_compat, parse_switch};
use super::revert::{file_at, refuse_served};
use super::{Exit, ParentArgs, on_engine, parse_format, print_json, say};
use crate::disks;

/// Change the version of a qcow2 image, or whether its refcounts may be lazy
///
/// The disk holds what it held. Nobody may use it meanwhile. An amend that is killed leaves the old image or the new one. An image that has
/// something that version 2 has no place for keeps its version, and so does one that is damaged. Everything else of an image stays as it was
/// made, and the error says how to get another one: by `spile convert`, `resize` or `rebase`.
#[derive(Debug, Args)]
pub struct AmendArgs {
    /// The disk, by its path
    disk: PathBuf,
    /// The version that it gets: 0.10 (2) or 1.1 (3)
    #[arg(long, value_name = "0.10|1.1", value_parser = parse_compat)]
    compat: Option<u32>,
    /// Whether other programs may write refcounts late. Spile never does
    #[arg(long, value_name = "on|off", value_parser = parse_switch)]
    lazy_refcounts: Option<bool>,
    /// The same by the names that qemu-img has for it, such as compat=1.1,lazy_refcounts=on
    #[arg(short = 'o', value_name = "NAME=VALUE,...")]
    qemu_options: Vec<String>,
    #[command(flatten)]
    made: MadeArgs,
    /// The disk's format, instead of what its extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Amend the disk although an image in its folder names it as its parent
    #[arg(long)]
    write_parent: bool,
    #[command(flatten)]
    parents: ParentArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Options of `spile create` that an image keeps for life, so that whoever tries them is told why.
#[derive(Debug, Args)]
struct MadeArgs {
    #[arg(long, hide = true)]
    cluster_size: Option<String>,
    #[arg(long, hide = true)]
    extended_l2: Option<String>,
    #[arg(long, hide = true)]
    refcount_bits: Option<String>,
    #[arg(long, hide = true)]
    compression_type: Option<String>,
}

/// An image that was amended.
#[derive(Debug, Serialize, ToSchema)]
pub struct AmendedDisk {
    /// The disk.
    path: String,
    /// Its version now: 2 (qemu-img's compat=0.10) or 3 (1.1).
    version: u32,
    /// Whether other programs may write its refcounts late now.
    lazy_refcounts: bool,
    /// Its version before.
    old_version: u32,
    /// Whether other programs might write its refcounts late before.
    old_lazy_refcounts: bool,
}

/// Runs `spile amend`.
///
/// # Errors
/// `InvalidInput` for what is not changed here; `Unsupported` for what the image cannot become; `Corrupt` for an image that is damaged;
/// `Busy` for a disk that is in use, or has a job that is not finished; the storage's. The image is what it was then.
pub fn run(args: &AmendArgs) -> Result<Exit> {
    let asked = args.asked()?;
    refuse_served(&args.disk)?;
    let at = file_at(&args.disk)?;
    let options =
        OpenOptions { read_only: false, write_parent: args.write_parent, ..args.parents.read_only(args.format) };
    let (path, Amended { before, after }) = on_engine(move || async move { amend(&at, &options, &asked).await })?;
    let amended = AmendedDisk {
        path: path.display().to_string(),
        version: after.version,
        lazy_refcounts: after.lazy_refcounts,
        old_version: before.version,
        old_lazy_refcounts: before.lazy_refcounts,
    };
    match (args.json, before == after) {
        (true, _) => print_json(&amended)?,
        (_, true) => say(format_args!("{}: is {} already", amended.path, describe(after))),
        _ => say(format_args!("{}: is {} now, and was {}", amended.path, describe(after), describe(before))),
    }
    Ok(Exit::Ok)
}

fn describe(revision: Revision) -> String {
    let compat = if revision.version == 2 { "0.10" } else { "1.1" };
    let lazy = if revision.lazy_refcounts { "lazy refcounts" } else { "no lazy refcounts" };
    format!("version {} (compat {compat}) with {lazy}", revision.version)
}

/// Amends the image. It is locked until its checkpoints are closed, which it keeps: nothing of the disk changes.
async fn amend(at: &Locator, options: &OpenOptions, asked: &Amendment) -> Result<(PathBuf, Amended)> {
    let graph = disks::open_keeping(CacheMode::Page, at, options).await?;
    let leaf = &graph.handles()[0];
    refuse_job(&HostFiles::new(OsFiles::new(CacheMode::Page)), leaf.path()).await?;
    let checkpoints = Checkpoints::none(Access { no_lock: options.no_lock, ..Access::default() });
    checkpoints.open(&graph).await?;
    let amended = leaf.image().amend(asked).await;
    let closed = graph.close().await;
    checkpoints.close(&graph).await;
    let amended = amended.and_then(|amended| closed.map(|()| amended))?;
    Ok((leaf.path().to_owned(), amended))
}

impl AmendArgs {
    /// What is to change.
    fn asked(&self) -> Result<Amendment> {
        let MadeArgs { cluster_size, extended_l2, refcount_bits, compression_type } = &self.made;
        let made = [
            ("cluster_size", cluster_size),
            ("extended_l2", extended_l2),
            ("refcount_bits", refcount_bits),
            ("compression_type", compression_type),
        ];
        if let Some((name, _)) = made.iter().find(|(_, value)| value.is_some()) {
            return Err(refusal(name));
        }
        let mut asked = Amendment { version: self.compat, lazy_refcounts: self.lazy_refcounts };
        for option in self.qemu_options.iter().flat_map(|list| list.split(',')) {
            set(&mut asked, option)?;
        }
        match asked == Amendment::default() {
            true => {
                Err(invalid("nothing is said to change".into())
                    .hint("say --compat 0.10|1.1 or --lazy-refcounts on|off"))
            }
            false => Ok(asked),
        }
    }
}

/// One option by the name that qemu-img has for it.
fn set(asked: &mut Amendment, option: &str) -> Result<()> {
    let (name, value) = option.split_once('=').unwrap_or((option, "on"));
    let bad = |why: String| invalid(format!("-o {option}: {why}")).hint(KNOWN);
    match name {
        "compat" => asked.version = Some(parse_compat(value).map_err(bad)?),
        "lazy_refcounts" => asked.lazy_refcounts = Some(parse_switch(value).map_err(bad)?),
        _ => return Err(refusal(name)),
    }
    Ok(())
}

const KNOWN: &str = "compat=0.10|1.1 and lazy_refcounts=on|off are changed here";

/// Why the option that qemu-img calls `name` is not changed here, and what is done instead.
fn refusal(name: &str) -> Error {
    let copy = format!("copy the disk: spile convert DISK NEW.qcow2 -o {name}=...");
    let (why, instead) = match name {
        "extended_l2" => {
            ("an image keeps the kind of its L2 entries, as all its tables are made of them", copy.as_str())
        }
        "cluster_size" => ("an image keeps the size of its clusters, as all its tables count in them", copy.as_str()),
        "refcount_bits" => ("an image keeps the width of its refcounts here", copy.as_str()),
        "compression_type" => {
            ("an image keeps its compression, as its compressed clusters do not say theirs", copy.as_str())
        }
        "size" => ("the size is changed by another command", "spile resize DISK SIZE"),
        "backing_file" | "backing_fmt" => (
            "the parent is changed by other commands",
            "spile rebase DISK --parent PARENT gives it another one, spile flatten DISK none",
        ),
        "preallocation" => ("only a new image gets its space at once", "spile create --preallocate=HOW"),
        "data_file" | "data_file_raw" => (
            "an image keeps its data where they are",
            "spile create --data-file makes a disk that has them elsewhere; qemu-img amend names another file, or none, in an image that has one",
        ),
        _ if name.starts_with("encrypt") => {
            ("encrypted images are not written here", "qemu-img amend changes their keys")
        }
        _ => ("there is no such option here", KNOWN),
    };
    invalid(format!("{name}: {why}")).hint(instead)
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::InvalidInput, what)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: AmendArgs,
    }

    fn asked(words: &[&str]) -> Result<Amendment> {
        let words = ["amend", "a.qcow2"].iter().chain(words);
        Line::try_parse_from(words).map_err(|error| invalid(error.to_string()))?.args.asked()
    }

    #[test]
    fn the_names_of_qemu_img_mean_the_same() {
        let all = Amendment { version: Some(3), lazy_refcounts: Some(true) };
        assert_eq!(asked(&["--compat", "1.1", "--lazy-refcounts", "on"]).unwrap(), all);
        assert_eq!(asked(&["-o", "compat=1.1,lazy_refcounts=on"]).unwrap(), all);
        assert_eq!(asked(&["-o", "compat=v3", "-o", "lazy_refcounts"]).unwrap(), all);
        let old = Amendment { version: Some(2), lazy_refcounts: None };
        assert_eq!(asked(&["-o", "compat=0.10"]).unwrap(), old);
        assert!(asked(&[]).unwrap_err().hint_text().unwrap().contains("--compat"));
    }

    #[test]
    fn what_is_not_changed_says_what_to_do_instead() {
        for (words, instead) in [
            (["-o", "extended_l2=on"], "spile convert"),
            (["--extended-l2", "on"], "spile convert DISK NEW.qcow2 -o extended_l2"),
            (["--cluster-size", "128k"], "spile convert"),
            (["--refcount-bits", "8"], "spile convert"),
            (["--compression-type", "zstd"], "spile convert"),
            (["-o", "size=2G"], "spile resize"),
            (["-o", "backing_file=b"], "spile rebase"),
            (["-o", "backing_fmt=raw"], "spile rebase"),
            (["-o", "preallocation=full"], "spile create"),
            (["-o", "data_file=d"], "qemu-img amend"),
            (["-o", "encrypt.new-secret=s"], "qemu-img amend"),
            (["-o", "compta=1.1"], "compat=0.10|1.1"),
            (["-o", "compat=4"], "compat=0.10|1.1"),
        ] {
            let error = asked(&words).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.hint_text().unwrap().contains(instead), "{words:?}: {error}");
        }
    }
}
