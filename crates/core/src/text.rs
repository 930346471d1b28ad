//! Text of strangers on its way to people: names of files, texts from images, words of peers.
//!
//! A terminal obeys control characters, and the characters that steer the direction of writing show a name as another one. So whatever a
//! stranger may have written passes [`printable`] before a person sees it. JSON stays exact: [`exact_json`] writes the same
//! string in other letters.

use std::fmt::Write as _;

/// True for control characters, line separators, and characters of the general category Cf (format) of Unicode 16, which nobody sees and
/// which change how the text around them is shown. The two joiners (U+200C, U+200D) are not among them: Persian, Indic scripts
/// and emoji need them.
pub fn is_unseen(c: char) -> bool {
    let is_format = matches!(c,
        '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{890}'..='\u{891}' | '\u{8e2}' | '\u{180e}'
        | '\u{200b}' | '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
        | '\u{fff9}'..='\u{fffb}' | '\u{110bd}' | '\u{110cd}' | '\u{13430}'..='\u{1343f}' | '\u{1bca0}'..='\u{1bca3}'
        | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e007f}');
    c.is_control() || is_format
}

/// `text` in one line, with the characters of [`is_unseen`] escaped as in Rust: `\n`, `\u{1b}`, `\u{202e}`.
pub fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match is_unseen(c) {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    out
}

/// [`printable`] of each line of `text`. Only for texts whose line breaks are the program's own.
pub fn printable_lines(text: &str) -> String {
    text.split('\n').map(printable).collect::<Vec<_>>().join("\n")
}

/// The JSON `text` with the characters of [`is_unseen`] that JSON allows in strings written as `\uXXXX`. It means the same.
pub fn exact_json(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if !is_unseen(c) || c == '\n' {
            out.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to a string cannot fail.
            let _ = write!(out, "\\u{unit:04x}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steers_a_terminal_or_the_direction_of_writing_is_escaped() {
        let hostile = "a\u{1b}[2J\u{202e}b\u{2066}\u{2069}\u{200e}\u{200f}\u{2028}\u{7f}\u{9b}\r";
        let shown = r"a\u{1b}[2J\u{202e}b\u{2066}\u{2069}\u{200e}\u{200f}\u{2028}\u{7f}\u{9b}\r";
        assert_eq!(printable(hostile), shown);
        assert_eq!(printable("größe 磁盘 क्‍ष \\"), "größe 磁盘 क्‍ष \\");
        assert_eq!(printable("two\nlines"), "two\\nlines");
        assert_eq!(printable_lines("two\nlines\u{202e}\n"), "two\nlines\\u{202e}\n");
    }

    #[test]
    fn json_stays_exact() {
        assert_eq!(
            exact_json("{\n  \"a\": \"\u{202e}\u{9b}\u{e0001}é\"\n}"),
            "{\n  \"a\": \"\\u202e\\u009b\\udb40\\udc01é\"\n}"
        );
    }
}
