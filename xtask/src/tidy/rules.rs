//! Rules about single Rust files: sizes, `unsafe`, work left open.

use super::Finding;
use super::source::{Source, line_of, words};
use std::path::Path;

/// Longest file.
const MAX_FILE_LINES: usize = 800;
/// Longest function.
const MAX_FUNCTION_LINES: usize = 100;
/// A function over this is long; one in ten may be.
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

/// No function is longer than a screen or two.
pub fn function_length(source: &Source) -> Vec<Finding> {
    let functions = source.functions();
    let too_long = functions.into_iter().filter(|f| f.length_lines > MAX_FUNCTION_LINES);
    too_long
        .map(|f| {
            let message =
                format!("fn {}: {} lines; a function has at most {MAX_FUNCTION_LINES}", f.name, f.length_lines);
            Finding::new(&source.path, f.line, message)
        })
        .collect()
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

/// The sizes of the tree, for people.
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

/// `unsafe` stands only where the design fences it, and each use says why it is sound.
pub fn unsafe_use(source: &Source) -> Vec<Finding> {
    let allowed = UNSAFE_FOLDERS.iter().any(|folder| source.path.starts_with(folder));
    let mut findings = Vec::new();
    for word in words(&source.code).iter().filter(|word| word.text == "unsafe") {
        let line = line_of(&source.code, word.start);
        if !allowed {
            let message = format!("unsafe outside {}", UNSAFE_FOLDERS.join(", "));
            findings.push(Finding::new(&source.path, line, message));
        } else if needs_reason(&source.code[word.end..]) && !has_reason(source, line) {
            let message = "unsafe without a `// SAFETY:` comment above it";
            findings.push(Finding::new(&source.path, line, message));
        }
    }
    findings
}

/// A block or an impl asserts something; `unsafe fn` and `unsafe trait` only ask for it.
fn needs_reason(after: &str) -> bool {
    let after = after.trim_start();
    after.starts_with('{') || after.starts_with("impl")
}

/// Looks for the reason on the line itself and upwards to the end of the statement before.
fn has_reason(source: &Source, line: usize) -> bool {
    let comments: Vec<&str> = source.comments.lines().collect();
    let code: Vec<&str> = source.code.lines().collect();
    for at in (0..line).rev() {
        if comments.get(at).is_some_and(|text| text.contains("SAFETY:")) {
            return true;
        }
        let text = code.get(at).map_or("", |text| text.trim_end());
        if at + 1 != line && text.ends_with([';', '{', '}']) {
            return false;
        }
    }
    false
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

/// Nothing is left for later inside the code: later is an issue.
pub fn left_open(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    for word in words(&source.comments) {
        if matches!(word.text, "TODO" | "FIXME" | "XXX") {
            let line = line_of(&source.comments, word.start);
            findings.push(Finding::new(&source.path, line, format!("{} in a comment", word.text)));
        }
    }
    for word in words(&source.code) {
        let is_macro = source.code[word.end..].starts_with('!');
        if is_macro && matches!(word.text, "todo" | "unimplemented" | "dbg") {
            let line = line_of(&source.code, word.start);
            findings.push(Finding::new(&source.path, line, format!("{}! left in", word.text)));
        }
    }
    findings
}

/// A test that is not run says why: the sums list it as a skip with its reason.
pub fn ignored_without_reason(source: &Source) -> Vec<Finding> {
    let found = source.code.match_indices("#[ignore]");
    found
        .map(|(at, _)| {
            let line = line_of(&source.code, at);
            Finding::new(&source.path, line, "#[ignore] without a reason")
        })
        .collect()
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
    fn a_function_over_the_limit_is_found() {
        assert!(function_length(&at("a.rs", &long_function(MAX_FUNCTION_LINES))).is_empty());
        assert_eq!(function_length(&at("a.rs", &long_function(MAX_FUNCTION_LINES + 1))).len(), 1);
    }

    #[test]
    fn too_many_long_functions_are_found() {
        let long = long_function(LONG_FUNCTION_LINES + 1);
        let short = "fn short() {}\n".repeat(9);
        assert!(long_function_share(&[at("a.rs", &format!("{long}{short}"))]).is_empty());
        assert_eq!(long_function_share(&[at("a.rs", &format!("{long}{long}{short}"))]).len(), 1);
    }

    #[test]
    fn unsafe_in_a_fenced_off_crate_is_found() {
        let text = "// SAFETY: sound.\nlet a = unsafe { f() };\n";
        assert_eq!(unsafe_use(&at("crates/image/src/a.rs", text)).len(), 1);
        assert!(unsafe_use(&at("crates/mem/src/a.rs", text)).is_empty());
    }

    #[test]
    fn unsafe_without_a_reason_is_found() {
        let bare = "fn a() {\n    f();\n    let a = unsafe { f() };\n}\nunsafe impl Send for A {}\n";
        assert_eq!(unsafe_use(&at("crates/mem/src/a.rs", bare)).len(), 2);
        let split = "// SAFETY: sound.\nlet a =\n    unsafe { f() };\n";
        assert!(unsafe_use(&at("crates/mem/src/a.rs", split)).is_empty());
        let stale = "// SAFETY: of the other.\nlet b = unsafe { g() };\nlet a = unsafe { f() };\n";
        assert_eq!(unsafe_use(&at("crates/mem/src/a.rs", stale)).len(), 1);
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
    fn work_left_open_is_found() {
        let text = "// TODO: later\nfn a() { todo!() }\nfn b() { unimplemented!() }\n";
        assert_eq!(left_open(&at("a.rs", text)).len(), 3);
        assert!(left_open(&at("a.rs", "const A: &str = \"TODO\"; fn todo() {}")).is_empty());
    }

    #[test]
    fn an_ignored_test_needs_a_reason() {
        assert_eq!(ignored_without_reason(&at("a.rs", "#[ignore]\nfn a() {}")).len(), 1);
        assert!(ignored_without_reason(&at("a.rs", "#[ignore = \"slow\"]\nfn a() {}")).is_empty());
    }
}
