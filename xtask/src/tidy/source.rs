//! A Rust file split into what the compiler sees and what only people see.
//!
//! A lexer that knows comments, strings and characters is enough for the rules. It never has to learn
//! new syntax, as a parser would. `code` and `comments` have the same lines as the text, with
//! everything else blanked, so a line number means the same in all three.

use std::path::PathBuf;

/// One Rust file.
pub struct Source {
    /// Relative to the top folder.
    pub path: PathBuf,
    /// The text with comments and the insides of literals blanked.
    pub code: String,
    /// The text with everything but comments blanked.
    pub comments: String,
    /// The text as it is.
    pub text: String,
}

/// A function with a body.
#[derive(Debug, PartialEq, Eq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// The line of `fn`, counted from 1.
    pub line: usize,
    /// Lines from `fn` to the closing brace, both counted.
    pub length_lines: usize,
}

impl Source {
    /// Splits `text`.
    pub fn new(path: PathBuf, text: String) -> Source {
        let kinds = classify(&text);
        let code = keep(&text, &kinds, Kind::Code);
        let comments = keep(&text, &kinds, Kind::Comment);
        Source { path, code, comments, text }
    }

    /// Functions with bodies, in the order of their `fn`.
    pub fn functions(&self) -> Vec<Function> {
        let words = words(&self.code);
        let mut found = Vec::new();
        for pair in words.windows(2) {
            if pair[0].text == "fn" && is_name_after(&self.code, pair[0].end, pair[1].start) {
                found.extend(self.function(pair[0].start, pair[1].end, pair[1].text));
            }
        }
        found
    }

    /// The function whose `fn` is at byte `start`; none when it is only declared.
    fn function(&self, start: usize, after_name: usize, name: &str) -> Option<Function> {
        let open = body_start(&self.code, after_name)?;
        let close = matching_brace(&self.code, open)?;
        let line = line_of(&self.code, start);
        let length_lines = line_of(&self.code, close) - line + 1;
        Some(Function { name: name.to_string(), line, length_lines })
    }
}

/// Only white space between `fn` and its name (so `fn(u8)` types do not count).
fn is_name_after(code: &str, end: usize, start: usize) -> bool {
    code[end..start].chars().all(char::is_whitespace)
}

/// The line of byte `at`, counted from 1.
pub fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count() + 1
}

/// The `{` of a body that follows a signature; none when `;` ends it first.
fn body_start(code: &str, from: usize) -> Option<usize> {
    let mut depth = 0_usize;
    for (at, byte) in code.bytes().enumerate().skip(from) {
        match byte {
            b'(' | b'[' => depth += 1,
            b')' | b']' => depth = depth.saturating_sub(1),
            b'{' if depth == 0 => return Some(at),
            b';' if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

fn matching_brace(code: &str, open: usize) -> Option<usize> {
    let mut depth = 0_usize;
    for (at, byte) in code.bytes().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' => {
                depth -= 1;
                if depth == 0 {
                    return Some(at);
                }
            }
            _ => {}
        }
    }
    None
}

/// An identifier or keyword, with its byte range.
pub struct Word<'a> {
    /// Its letters.
    pub text: &'a str,
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
}

/// The identifiers and keywords of `code`, in order.
pub fn words(code: &str) -> Vec<Word<'_>> {
    let mut found = Vec::new();
    let mut start = None;
    for (at, character) in code.char_indices().chain([(code.len(), ' ')]) {
        let inside = character.is_alphanumeric() || character == '_';
        match (inside, start) {
            (true, None) => start = Some(at),
            (false, Some(from)) => {
                found.push(Word { text: &code[from..at], start: from, end: at });
                start = None;
            }
            _ => {}
        }
    }
    found
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Code,
    Comment,
    Literal,
}

/// `text` with every byte that is not of `kind` (and not a line end) made a blank.
fn keep(text: &str, kinds: &[Kind], kind: Kind) -> String {
    let bytes = text.bytes().zip(kinds);
    let kept = bytes.map(|(byte, k)| if byte == b'\n' || *k == kind { byte } else { b' ' });
    // Literals and comments are kept or blanked whole, so no character is cut in two.
    String::from_utf8(kept.collect()).unwrap_or_default()
}

/// What each byte of `text` belongs to.
fn classify(text: &str) -> Vec<Kind> {
    let bytes = text.as_bytes();
    let mut kinds = vec![Kind::Code; bytes.len()];
    let mut at = 0;
    while at < bytes.len() {
        let (kind, end) = token_at(bytes, at);
        kinds[at..end].fill(kind);
        at = end;
    }
    kinds
}

/// The kind and the end of what starts at `at`.
fn token_at(bytes: &[u8], at: usize) -> (Kind, usize) {
    let rest = &bytes[at..];
    if rest.starts_with(b"//") {
        let end = rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len());
        return (Kind::Comment, at + end);
    }
    if rest.starts_with(b"/*") {
        return (Kind::Comment, at + block_comment_length(rest));
    }
    let starts_word = at == 0 || !is_word_byte(bytes[at - 1]);
    if starts_word && let Some(length) = raw_string_length(rest) {
        return (Kind::Literal, at + length);
    }
    match rest[0] {
        b'"' => (Kind::Literal, at + string_length(rest)),
        b'\'' => match character_length(rest) {
            Some(length) => (Kind::Literal, at + length),
            None => (Kind::Code, at + 1),
        },
        _ => (Kind::Code, at + 1),
    }
}

fn is_word_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

/// Block comments nest.
fn block_comment_length(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at < rest.len() {
        if rest[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

fn string_length(rest: &[u8]) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// `r"…"`, `r#"…"#`, with or without `b` or `c` before; none when it is not one.
fn raw_string_length(rest: &[u8]) -> Option<usize> {
    let prefix = usize::from(matches!(rest[0], b'b' | b'c'));
    if rest.get(prefix) != Some(&b'r') {
        return None;
    }
    let hashes = rest[prefix + 1..].iter().take_while(|byte| **byte == b'#').count();
    let open = prefix + 1 + hashes;
    if rest.get(open) != Some(&b'"') {
        return None;
    }
    let mut close = vec![b'"'];
    close.resize(hashes + 1, b'#');
    let body = &rest[open + 1..];
    let length = body.windows(close.len()).position(|window| window == close)?;
    Some(open + 1 + length + close.len())
}

/// A character literal; none when the quote starts a lifetime.
fn character_length(rest: &[u8]) -> Option<usize> {
    let second = *rest.get(1)?;
    if second == b'\\' {
        let close = rest[3..].iter().position(|byte| *byte == b'\'')?;
        return Some(3 + close + 1);
    }
    let width = match second {
        0..0x80 => 1,
        0x80..0xe0 => 2,
        0xe0..0xf0 => 3,
        _ => 4,
    };
    (rest.get(1 + width) == Some(&b'\'')).then_some(width + 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        Source::new("sample.rs".into(), text.to_string())
    }

    #[test]
    fn comments_and_literals_leave_the_code() {
        let text = "let a = \"fn x() {\"; // fn y() {\nlet c = '{'; /* { */ let d: &'a u8;\n";
        let split = source(text);
        assert_eq!(split.code.matches('{').count(), 0);
        assert!(split.code.contains("'a u8"));
        assert!(split.comments.contains("fn y"));
        assert_eq!(split.code.lines().count(), text.lines().count());
    }

    #[test]
    fn raw_strings_and_escapes_end_where_they_end() {
        let split = source("let a = r#\"\"{\"#; let b = \"\\\"{\"; let c = '\\''; let d = b'{';");
        assert_eq!(split.code.matches('{').count(), 0);
        assert!(split.code.contains("let d"));
    }

    #[test]
    fn functions_are_measured_from_fn_to_brace() {
        let split = source("fn one() {}\ntrait T { fn declared(&self); }\nfn two(\n) -> u8 {\n 1\n}\n");
        let found: Vec<_> = split.functions().into_iter().map(|f| (f.name, f.line, f.length_lines)).collect();
        assert_eq!(found, [("one".to_string(), 1, 1), ("two".to_string(), 3, 4)]);
    }

    #[test]
    fn a_function_type_is_no_function() {
        assert!(source("type F = fn(u8) -> u8; const A: [u8; 2] = [0; 2];").functions().is_empty());
    }
}
