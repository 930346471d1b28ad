//! Dead files: a Rust file that no `mod` reaches is never compiled and never tested.

use super::Finding;
use super::source::{Source, words};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Files that no target's root reaches through `mod`, `#[path]` or `include!`.
pub fn dead_files(sources: &[Source], roots: &[PathBuf]) -> Vec<Finding> {
    let known: BTreeMap<&Path, &Source> = sources.iter().map(|source| (source.path.as_path(), source)).collect();
    let mut reached: BTreeSet<PathBuf> = BTreeSet::new();
    let mut waiting: Vec<(PathBuf, bool)> = roots.iter().map(|root| (root.clone(), true)).collect();
    while let Some((path, is_root)) = waiting.pop() {
        let Some(source) = known.get(path.as_path()) else { continue };
        if reached.insert(path.clone()) {
            let children = children(source, is_root);
            waiting.extend(children.into_iter().map(|child| (child, false)));
        }
    }
    let dead = sources.iter().filter(|source| !reached.contains(&source.path));
    dead.map(|source| Finding::new(&source.path, 0, "no `mod` reaches this file")).collect()
}

/// Every path that `source` may pull in; those that do not exist are dropped by the caller.
fn children(source: &Source, is_root: bool) -> Vec<PathBuf> {
    let folder = source.path.parent().unwrap_or(Path::new(""));
    let stem = source.path.file_stem().unwrap_or_default();
    let nested = if is_root || stem == "mod" { folder.to_path_buf() } else { folder.join(stem) };
    let mut found = Vec::new();
    for name in declared(&source.code) {
        found.push(nested.join(format!("{name}.rs")));
        found.push(nested.join(&name).join("mod.rs"));
    }
    for quoted in pulled_in(&source.text) {
        found.push(normal(&folder.join(quoted)));
    }
    found
}

/// Names of `mod name;`, with the inline modules around them: `a/b` for `mod a { mod b; }`.
fn declared(code: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut open: Vec<(String, usize)> = Vec::new();
    for pair in words(code).windows(2).filter(|pair| pair[0].text == "mod") {
        let (at, name) = (pair[0].start, pair[1].text);
        open.retain(|(_, end)| at < *end);
        let after = &code[pair[1].end..];
        let mut path: Vec<&str> = open.iter().map(|(name, _)| name.as_str()).collect();
        path.push(name);
        if after.trim_start().starts_with(';') {
            names.push(path.join("/"));
        } else if after.trim_start().starts_with('{') {
            let end = pair[1].end + inline_length(after);
            open.push((name.to_string(), end));
        }
    }
    names
}

/// Bytes to the end of the braces that `after` opens.
fn inline_length(after: &str) -> usize {
    let mut depth = 0_usize;
    for (at, byte) in after.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 1 => return at,
            b'}' => depth -= 1,
            _ => {}
        }
    }
    after.len()
}

/// Paths in `#[path = "…"]` and `include!("…")`.
fn pulled_in(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for opening in ["#[path = \"", "include!(\""] {
        for (at, _) in text.match_indices(opening) {
            let rest = &text[at + opening.len()..];
            found.extend(rest.split('"').next());
        }
    }
    found
}

/// `path` without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            std::path::Component::ParentDir => {
                clean.pop();
            }
            std::path::Component::CurDir => {}
            other => clean.push(other),
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> Vec<Source> {
        let file = |(path, text): &(&str, &str)| Source::new(path.into(), text.to_string());
        files.iter().map(file).collect()
    }

    fn dead(files: &[(&str, &str)]) -> Vec<String> {
        let findings = dead_files(&tree(files), &["src/lib.rs".into()]);
        findings.iter().map(|finding| finding.path.display().to_string()).collect()
    }

    #[test]
    fn a_file_without_a_mod_is_found() {
        let files = [
            ("src/lib.rs", "mod a; // mod gone;"),
            ("src/a.rs", "pub mod b;"),
            ("src/a/b.rs", ""),
            ("src/gone.rs", ""),
        ];
        assert_eq!(dead(&files), ["src/gone.rs"]);
    }

    #[test]
    fn nested_and_renamed_modules_are_reached() {
        let files = [
            ("src/lib.rs", "mod a { mod b; } #[path = \"../other/c.rs\"] mod c; mod d;"),
            ("src/a/b.rs", ""),
            ("other/c.rs", ""),
            ("src/d/mod.rs", "mod e;"),
            ("src/d/e.rs", ""),
        ];
        assert!(dead(&files).is_empty());
    }
}
