//! Rules about text: links and commands in docs exist, and no file names the machine that it was written on.

use super::Finding;
use crate::{COMMANDS, Result};
use std::path::Path;

/// Folders of one machine. Written in two halves, so that this file passes its own rule.
const MACHINE_FOLDERS: &[&str] = &[concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/")];

/// Hosts of package archives: what a machine downloads from is the machine's own choice.
const ARCHIVE_HOSTS: &[&str] = &[
    concat!("deb.deb", "ian.org"),
    concat!("snapshot.deb", "ian.org"),
    concat!("security.deb", "ian.org"),
    concat!("ftp.deb", "ian.org"),
    concat!("archive.ubu", "ntu.com"),
    concat!("security.ubu", "ntu.com"),
    concat!("static.cra", "tes.io"),
    concat!("index.cra", "tes.io"),
    concat!("pypi", ".org"),
    concat!("registry.np", "mjs.org"),
];

/// No absolute path of a machine, no archive's host.
pub fn forbidden_words(path: &Path, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let folders = MACHINE_FOLDERS.iter().filter(|word| starts_a_path(line, word));
        let hosts = ARCHIVE_HOSTS.iter().filter(|word| line.contains(**word));
        for word in folders.chain(hosts) {
            findings.push(Finding::new(path, at + 1, format!("'{word}' does not belong here")));
        }
    }
    findings
}

/// Is `folder` in `line` as the start of an absolute path, not inside a longer one?
fn starts_a_path(line: &str, folder: &str) -> bool {
    line.match_indices(folder).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || "._-~})$*".contains(c))
    })
}

/// Nothing is left for later in scripts either.
pub fn left_open(path: &Path, text: &str) -> Vec<Finding> {
    let marks = [concat!("TO", "DO"), concat!("FIX", "ME")];
    let mut findings = Vec::new();
    for (at, line) in text.lines().enumerate() {
        for mark in marks.iter().filter(|mark| line.contains(**mark)) {
            findings.push(Finding::new(path, at + 1, format!("{mark} left in")));
        }
    }
    findings
}

/// The commands that docs may name.
pub struct Names {
    make_targets: Vec<String>,
}

impl Names {
    /// Reads the targets of the Makefile in `root`.
    pub fn read(root: &Path) -> Result<Names> {
        let text = std::fs::read_to_string(root.join("Makefile")).map_err(|error| format!("Makefile: {error}"))?;
        Ok(Names { make_targets: make_targets(&text) })
    }
}

fn make_targets(makefile: &str) -> Vec<String> {
    let rules = makefile.lines().filter(|line| !line.starts_with(['\t', '#', ' ', '.']));
    let heads = rules.filter_map(|line| line.split_once(':').filter(|(_, r)| !r.starts_with('=')));
    heads.flat_map(|(head, _)| head.split_whitespace().map(str::to_string)).collect()
}

/// Links lead somewhere; commands exist.
pub fn markdown(root: &Path, path: &Path, text: &str, names: &Names) -> Vec<Finding> {
    let mut findings = Vec::new();
    let folder = root.join(path.parent().unwrap_or(Path::new("")));
    let mut fenced = false;
    for (at, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            continue;
        }
        let links = link_targets(line).filter(|target| !fenced && !folder.join(target).exists());
        let links = links.map(|target| format!("link to '{target}', which does not exist"));
        let made = make_uses(line, fenced).filter(|name| !names.make_targets.contains(name));
        let made = made.map(|name| format!("'make {name}' does not exist"));
        let tasks = xtask_uses(line).filter(|name| !COMMANDS.iter().any(|known| known.0 == name));
        let tasks = tasks.map(|name| format!("'cargo xtask {name}' does not exist"));
        let all = links.chain(made).chain(tasks);
        findings.extend(all.map(|message| Finding::new(path, at + 1, message)));
    }
    findings
}

/// Files that `[text](target)` links to, without anchors; links to elsewhere are left out.
fn link_targets(line: &str) -> impl Iterator<Item = &str> {
    let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let targets = targets.map(|target| target.split(['#', ' ']).next().unwrap_or(""));
    targets.filter(|target| !target.is_empty() && !target.contains(':'))
}

/// Targets in "`make target`" and, inside a fence, in lines that are the command.
fn make_uses(line: &str, fenced: bool) -> impl Iterator<Item = String> {
    let quoted = line.match_indices("`make ").map(|(at, found)| first_word(&line[at + found.len()..]));
    let command = line.trim_start().trim_start_matches("$ ");
    let command = command.strip_prefix("make ").filter(|_| fenced).map(first_word);
    quoted.chain(command).filter(|name| !name.is_empty())
}

/// Commands in `cargo xtask command`, anywhere.
fn xtask_uses(line: &str) -> impl Iterator<Item = String> {
    let found = line.match_indices("cargo xtask ");
    found.map(|(at, found)| first_word(&line[at + found.len()..])).filter(|name| !name.is_empty())
}

/// The lower-case word at the start of `text`; empty when it is something else.
fn first_word(text: &str) -> String {
    text.chars().take_while(|c| c.is_ascii_lowercase() || *c == '-').collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> Vec<Finding> {
        let names = Names { make_targets: make_targets("demo: build\n\t@echo no: such\nA := b\n") };
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        markdown(root, Path::new("README.md"), text, &names)
    }

    #[test]
    fn a_link_to_nothing_is_found() {
        assert!(check("[a](Cargo.toml) [b](src/main.rs#x) [c](https://rustup.rs) [d](#here)").is_empty());
        assert_eq!(check("see [a](gone.md)").len(), 1);
    }

    #[test]
    fn a_command_that_does_not_exist_is_found() {
        assert!(check("`make demo` and `cargo xtask tidy`; make sure").is_empty());
        assert_eq!(check("`make coffee`").len(), 1);
        assert_eq!(check("```\nmake coffee\nmake demo\n```").len(), 1);
        assert_eq!(check("run cargo xtask coffee").len(), 1);
    }

    #[test]
    fn a_machines_own_path_is_found() {
        for folder in MACHINE_FOLDERS {
            let text = format!("open(\"{folder}x\")");
            assert_eq!(forbidden_words(Path::new("a.py"), &text).len(), 1, "{folder}");
        }
        let inside = format!("$dir{}x and target{}y", MACHINE_FOLDERS[0], MACHINE_FOLDERS[0]);
        assert!(forbidden_words(Path::new("a.py"), &inside).is_empty());
    }

    #[test]
    fn an_archives_host_is_found() {
        for host in ARCHIVE_HOSTS {
            let text = format!("URIs: http://{host}/x");
            assert_eq!(forbidden_words(Path::new("a.sh"), &text).len(), 1, "{host}");
        }
    }

    #[test]
    fn work_left_open_in_a_script_is_found() {
        let text = format!("# {}: later", concat!("TO", "DO"));
        assert_eq!(left_open(Path::new("a.sh"), &text).len(), 1);
    }
}
