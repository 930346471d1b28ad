//! Names that a shell completes: disks, snapshots, checkpoints and jobs that there are just now.
//!
//! The scripts of clap know commands and options. To them [`names_in`] adds a few lines that ask `spile complete-names`, which goes by the words that are typed already.

use std::path::{Path, PathBuf};

use clap::Args;
use clap_complete::Shell;
use spile_core::{Locator, Result};
use spile_image::OpenOptions;
use spile_life::snapshot::name_of;
use spile_server::serving::api::client::{LOOK_PATIENCE, ask};
use spile_server::serving::api::discovery;
use spile_server::serving::api::types::DiskDetail;

use super::control::path_of;
use super::revert::parents_in;
use super::{Exit, help, say};
use crate::log::printable;

/// Print the names that fit behind these words
#[derive(Debug, Args)]
pub struct CompleteNamesArgs {
    /// The words of the command line before the one that is completed, from `spile` on
    #[arg(allow_hyphen_values = true, trailing_var_arg = true)]
    words: Vec<String>,
}

/// What a word may name.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// A disk of a server.
    Disk,
    /// A job.
    Job,
    /// A snapshot of this disk.
    Snapshot(String),
    /// A checkpoint of this disk.
    Checkpoint(String),
}

/// Commands whose first words are disks, or the first one is; those that have aliases by their own name.
const OF_DISKS: [&str; 29] = [
    "show",
    "stat",
    "slow",
    "events",
    "trace",
    "attach",
    "detach",
    "resize",
    "coalesce",
    "flatten",
    "move",
    "job",
    "backup",
    "snapshot",
    "clone",
    "revert",
    "delete",
    "checkpoint",
    "changed",
    "on-error",
    "shape",
    "limit",
    "pause",
    "resume",
    "accept-loss",
    "ls",
    "info",
    "map",
    "tree",
];
/// Commands all of whose words are disks.
const ALL_DISKS: [&str; 2] = ["snapshot", "backup"];

/// What fits behind `words`, from `spile` on.
fn kinds(words: &[String]) -> Vec<Kind> {
    let Some((verb, words)) = words.get(1).zip(words.get(2..)) else { return Vec::new() };
    let command = help::command();
    let Some(verb) = command.find_subcommand(verb).map(|command| command.get_name().to_owned()) else {
        return Vec::new();
    };
    let disk = words.first().filter(|word| !word.starts_with('-')).cloned();
    match (verb.as_str(), words.last().map(String::as_str), disk) {
        ("coalesce", Some("--layer"), Some(disk)) => vec![Kind::Snapshot(disk)],
        ("changed" | "backup", Some("--since"), Some(disk)) => vec![Kind::Checkpoint(disk)],
        // The value of another option.
        (_, Some(option), _) if option.starts_with('-') => Vec::new(),
        ("job", None, _) => vec![Kind::Job, Kind::Disk],
        (verb, None, _) if OF_DISKS.contains(&verb) => vec![Kind::Disk],
        ("revert" | "delete", _, Some(disk)) if words.len() == 1 => vec![Kind::Snapshot(disk)],
        ("checkpoint", _, Some(disk)) if words.len() == 1 => vec![Kind::Checkpoint(disk)],
        (verb, _, Some(_)) if ALL_DISKS.contains(&verb) => vec![Kind::Disk],
        _ => Vec::new(),
    }
}

/// Runs `spile complete-names`. A server that does not answer has no names: nobody wants an error in the middle of a word.
///
/// # Errors
/// None.
pub fn run(args: &CompleteNamesArgs) -> Result<Exit> {
    let mut names: Vec<_> = kinds(&args.words).into_iter().flat_map(|kind| names(kind).unwrap_or_default()).collect();
    names.sort();
    names.dedup();
    // A name with blanks or control characters in it is typed by hand.
    names.iter().filter(|name| **name == printable(name) && !name.contains(char::is_whitespace)).for_each(say);
    Ok(Exit::Ok)
}

fn names(kind: Kind) -> Result<Vec<String>> {
    let disks = || Ok::<_, spile_core::Error>(discovery::servers()?.into_iter().flat_map(|(_, disks)| disks));
    Ok(match kind {
        Kind::Disk => disks()?.map(|disk| disk.name).collect(),
        Kind::Job => discovery::jobs()?.into_iter().flat_map(|(_, jobs)| jobs).map(|job| job.id).collect(),
        Kind::Snapshot(disk) => snapshots(&disk)?,
        Kind::Checkpoint(disk) => detail(&disk)?.disk.checkpoints,
    })
}

fn detail(disk: &str) -> Result<DiskDetail> {
    let (server, name) = discovery::find_disk(disk)?;
    ask(&server, "GET", &path_of(&name), LOOK_PATIENCE)
}

/// The snapshots of a disk: of one that is served those that are below it, of a file those that are called so beside it.
fn snapshots(disk: &str) -> Result<Vec<String>> {
    let (leaf, parents): (PathBuf, Vec<PathBuf>) = match detail(disk) {
        Ok(detail) => {
            let parents = detail.layers.iter().skip(1).map(|layer| layer.path.clone().into()).collect();
            (detail.disk.path.into(), parents)
        }
        Err(_) => (disk.into(), parents_in(&Locator::from(Path::new(disk)), &OpenOptions::default())),
    };
    let of = super::snapshots::Of { disk: Path::new(&leaf), parents: &parents };
    Ok(of.names().into_iter().filter(|name| *name != name_of(&leaf, &leaf)).collect())
}

/// What is added to the script of a shell.
pub fn names_in(shell: Shell) -> &'static str {
    match shell {
        Shell::Bash => BASH,
        Shell::Zsh => ZSH,
        Shell::Fish => FISH,
        _ => "",
    }
}

const BASH: &str = r#"

# The names that there are: disks, snapshots, checkpoints and jobs.
_spile_with_names() {
    _spile "$@"
    local name word="${COMP_WORDS[COMP_CWORD]}"
    while IFS= read -r name; do
        [[ $name == "$word"* ]] && COMPREPLY+=("$name")
    done < <(spile complete-names -- "${COMP_WORDS[@]:0:COMP_CWORD}" 2>/dev/null)
}
complete -F _spile_with_names -o nosort -o bashdefault -o default spile 2>/dev/null ||
    complete -F _spile_with_names -o bashdefault -o default spile"#;

const ZSH: &str = r#"

# The names that there are: disks, snapshots, checkpoints and jobs.
_spile_with_names() {
    local -a typed names
    typed=("${(@)words[1,CURRENT-1]}")
    names=("${(@f)$(spile complete-names -- "${(@)typed}" 2>/dev/null)}")
    [[ -n ${names[1]} ]] && compadd -a names
    _spile "$@"
}
compdef _spile_with_names spile"#;

const FISH: &str = r#"

# The names that there are: disks, snapshots, checkpoints and jobs.
complete -c spile -f -a "(spile complete-names -- (commandline -opc) 2>/dev/null)""#;

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds_of(line: &str) -> Vec<Kind> {
        kinds(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn what_fits_depends_on_the_command_and_on_what_stands_there_already() {
        let disk = || "d".to_owned();
        for (line, kinds) in [
            ("spile", vec![]),
            ("spile show", vec![Kind::Disk]),
            ("spile status", vec![Kind::Disk]),
            ("spile rm", vec![Kind::Disk]),
            ("spile commit", vec![Kind::Disk]),
            ("spile show d", vec![]),
            ("spile job", vec![Kind::Job, Kind::Disk]),
            ("spile revert d", vec![Kind::Snapshot(disk())]),
            ("spile delete d", vec![Kind::Snapshot(disk())]),
            ("spile coalesce d --layer", vec![Kind::Snapshot(disk())]),
            ("spile coalesce d --rate", vec![]),
            ("spile changed d --since", vec![Kind::Checkpoint(disk())]),
            ("spile checkpoint d", vec![Kind::Checkpoint(disk())]),
            ("spile snapshot d", vec![Kind::Disk]),
            ("spile convert", vec![]),
            ("spile nonsense", vec![]),
        ] {
            assert_eq!(kinds_of(line), kinds, "{line}");
        }
    }

    #[test]
    fn every_command_that_is_named_here_is_one() {
        let command = help::command();
        for verb in OF_DISKS.iter().chain(&ALL_DISKS) {
            assert!(command.find_subcommand(verb).is_some_and(|found| found.get_name() == *verb), "{verb}");
        }
    }
}
