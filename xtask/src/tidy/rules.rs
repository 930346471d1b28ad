//! Rules about single Rust files that neither the compiler nor Clippy knows: sizes, the fence around `unsafe`, work left
//! open. (Clippy looks at the length of functions, at `// SAFETY:` comments, at `todo!` and at ignored tests.)

use super::Finding;
use super::source::{Source, line_of, words};
use std::path::Path;

/// The longest file, in lines.
const MAX_FILE_LINES: usize = 800;
/// A longer function counts as long; one in ten may be long.
const LONG_FUNCTION_LINES: usize = 35;
/// The share of long functions that is still allowed, in per cent.
const MAX_LONG_PERCENT: usize = 10;

/// Folders that may hold `unsafe`: whole crates, and the part of a crate that speaks to a system of its own.
const UNSAFE_FOLDERS: &[&str] = &["crates/mem/", "crates/engine/", "crates/xen/src/sys/", "crates/lab/src/sys/"];

/// Files stay readable in one sitting.
pub fn file_length(source: &Source) -> Vec<Finding> {
    let lines = source.text.lines().count();
    if lines <= MAX_FILE_LINES {
        return Vec::new();
    }
    vec![Finding::new(&source.path, 0, format!("{lines} lines; a file has at most {MAX_FILE_LINES}"))]
}

/// Nine functions in ten are short.
pub fn long_function_share(sources: &[Source]) -> Vec<Finding> {
    let lengths = function_lengths(sources);
    let long = lengths.iter().filter(|length| **length > LONG_FUNCTION_LINES).count();
    if long * 100 <= lengths.len() * MAX_LONG_PERCENT {
        return Vec::new();
    }
    let message = format!(
        "{long} of {} functions are over {LONG_FUNCTION_LINES} lines; at most {MAX_LONG_PERCENT} % may be",
        lengths.len()
    );
    vec![Finding::new(Path::new("."), 0, message)]
}

/// A line with the sizes of the tree, for people to read.
pub fn sizes_line(sources: &[Source]) -> String {
    let lengths = function_lengths(sources);
    let long = lengths.iter().filter(|length| **length > LONG_FUNCTION_LINES).count();
    let lines: usize = sources.iter().map(|source| source.text.lines().count()).sum();
    format!(
        "{} files, {lines} lines, {} functions: median {} lines, longest {}, {long} over {LONG_FUNCTION_LINES}",
        sources.len(),
        lengths.len(),
        lengths.get(lengths.len() / 2).copied().unwrap_or(0),
        lengths.last().copied().unwrap_or(0),
    )
}

/// Lengths of all functions, sorted.
fn function_lengths(sources: &[Source]) -> Vec<usize> {
    let functions = sources.iter().flat_map(Source::functions);
    let mut lengths: Vec<usize> = functions.map(|function| function.length_lines).collect();
    lengths.sort_unstable();
    lengths
}

/// A crate without `unsafe` says so at its root, so that the compiler holds it to it.
pub fn forbids_unsafe(source: &Source) -> Vec<Finding> {
    let allowed = UNSAFE_FOLDERS.iter().any(|folder| source.path.starts_with(folder));
    let is_partly = source.path.parent().is_some_and(|folder| {
        UNSAFE_FOLDERS.iter().any(|allowed| Path::new(allowed) != folder && Path::new(allowed).starts_with(folder))
    });
    let lint = if is_partly { "#![deny(unsafe_code)]" } else { "#![forbid(unsafe_code)]" };
    if allowed || source.code.contains(lint) {
        return Vec::new();
    }
    vec![Finding::new(&source.path, 0, format!("the crate's root lacks {lint}"))]
}

/// A `deny(unsafe_code)` at a crate's root could be lifted by an `allow` anywhere. It may be lifted only in the folders for
/// `unsafe`.
pub fn allows_unsafe(source: &Source) -> Vec<Finding> {
    let allowed = UNSAFE_FOLDERS.iter().any(|folder| source.path.starts_with(folder));
    let found = source.code.match_indices("(unsafe_code").filter(|(at, _)| !allowed && !is_fence(&source.code[..*at]));
    let message = format!("unsafe code is allowed only in {}", UNSAFE_FOLDERS.join(", "));
    found.map(|(at, _)| Finding::new(&source.path, line_of(&source.code, at), message.clone())).collect()
}

/// True when `before` ends with the start of an attribute that forbids or denies.
fn is_fence(before: &str) -> bool {
    before.ends_with("![deny") || before.ends_with("![forbid")
}

/// Nothing is left for later inside the code: later is an issue.
pub fn left_open(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    for word in words(&source.comments) {
        if matches!(word.text, "TODO" | "FIXME" | "XXX") {
            let line = line_of(&source.comments, word.start);
            findings.push(Finding::new(&source.path, line, format!("{} in a comment", word.text)));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(path: &str, text: &str) -> Source {
        Source::new(path.into(), text.to_string())
    }

    fn long_function(lines: usize) -> String {
        format!("fn long() {{\n{}}}\n", "    step();\n".repeat(lines - 2))
    }

    #[test]
    fn a_file_over_the_limit_is_found() {
        assert!(file_length(&at("a.rs", &"x\n".repeat(MAX_FILE_LINES))).is_empty());
        assert_eq!(file_length(&at("a.rs", &"x\n".repeat(MAX_FILE_LINES + 1))).len(), 1);
    }

    #[test]
    fn too_many_long_functions_are_found() {
        let long = long_function(LONG_FUNCTION_LINES + 1);
        let short = "fn short() {}\n".repeat(9);
        assert!(long_function_share(&[at("a.rs", &format!("{long}{short}"))]).is_empty());
        assert_eq!(long_function_share(&[at("a.rs", &format!("{long}{long}{short}"))]).len(), 1);
    }

    #[test]
    fn a_root_that_allows_unsafe_is_found() {
        assert_eq!(forbids_unsafe(&at("crates/image/src/lib.rs", "mod a;")).len(), 1);
        let good = "#![forbid(unsafe_code)]\nmod a;";
        assert!(forbids_unsafe(&at("crates/image/src/lib.rs", good)).is_empty());
        let partly = "#![deny(unsafe_code)]\nmod sys;";
        assert!(forbids_unsafe(&at("crates/xen/src/lib.rs", partly)).is_empty());
        assert_eq!(forbids_unsafe(&at("crates/image/src/lib.rs", partly)).len(), 1);
        assert_eq!(forbids_unsafe(&at("crates/xen/src/lib.rs", "mod sys;")).len(), 1);
        let quoted = "// #![forbid(unsafe_code)]\nmod a;";
        assert_eq!(forbids_unsafe(&at("crates/image/src/lib.rs", quoted)).len(), 1);
    }

    #[test]
    fn a_hole_in_the_fence_is_found() {
        let hole = "#[allow(unsafe_code)]\nfn a() {}";
        assert_eq!(allows_unsafe(&at("crates/lab/src/queue.rs", hole)).len(), 1);
        assert!(allows_unsafe(&at("crates/lab/src/sys/mod.rs", hole)).is_empty());
        assert!(allows_unsafe(&at("crates/lab/src/lib.rs", "#![deny(unsafe_code)]")).is_empty());
    }

    #[test]
    fn work_left_open_is_found() {
        assert_eq!(left_open(&at("a.rs", "// TODO: later\nfn a() {}\n")).len(), 1);
        assert!(left_open(&at("a.rs", "const A: &str = \"TODO\"; fn todo() {}")).is_empty());
    }
}
