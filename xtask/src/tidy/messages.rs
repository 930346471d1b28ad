//! No program reads the text of a message: an error has a kind and a code, and its words are for people.

use super::Finding;
use super::paths::is_product;
use super::source::{Source, line_of};

/// What looks at the text of an error. Between these and [`READS`] there are only blanks.
const TEXTS: &[&str] = &[".message()", "error.to_string()", "e.to_string()"];
/// What acts on a text.
const READS: &[&str] = &[".contains(", ".starts_with(", ".ends_with(", ".find(", ".strip_prefix(", "==", "!="];

/// Refuses control flow that hangs on the text of a message.
pub fn check(source: &Source) -> Vec<Finding> {
    if !is_product(&source.path.to_string_lossy()) {
        return Vec::new();
    }
    let code = source.code.split("#[cfg(test)]").next().unwrap_or_default();
    let mut lines: Vec<usize> = TEXTS
        .iter()
        .flat_map(|text| code.match_indices(text).map(move |(at, _)| (at, at + text.len())))
        .filter(|(at, _)| !is_inside_a_name(code, *at))
        .filter(|(_, end)| READS.iter().any(|read| code[*end..].trim_start().starts_with(read)))
        .map(|(at, _)| line_of(code, at))
        .collect();
    lines.sort_unstable();
    lines.dedup();
    let message = "the text of a message is for people; act on the error's kind or code (crates/core/src/code.rs)";
    lines.into_iter().map(|line| Finding::new(&source.path, line, message.to_owned())).collect()
}

/// True when what begins at `at` is the end of a longer name.
fn is_inside_a_name(code: &str, at: usize) -> bool {
    let is_of_name = |c: char| c.is_alphanumeric() || c == '_';
    code[at..].starts_with(is_of_name) && code[..at].ends_with(is_of_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &str, text: &str) -> Vec<usize> {
        check(&Source::new(path.into(), text.to_owned())).into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn what_reads_a_message_is_found() {
        let product = "crates/life/src/x.rs";
        assert_eq!(lines(product, "\nif error.message().contains(WORD) {}"), [2]);
        assert_eq!(lines(product, "if error\n    .to_string().contains(WORD) {}"), Vec::<usize>::new());
        assert_eq!(lines(product, "Err(e) if e.to_string() == WORD => {}"), [1]);
        assert_eq!(lines(product, "say(error.to_string()); name.to_string() == other;"), Vec::<usize>::new());
        assert_eq!(lines(product, "#[cfg(test)]\nfn f() { error.message().contains(WORD) }"), Vec::<usize>::new());
        assert_eq!(lines("crates/sim/src/x.rs", "error.message().contains(WORD)"), Vec::<usize>::new());
    }
}
