//! What is known of texts without a font: how much room one takes at most, and where lines are broken.

use spile_core::is_unseen;

/// A text's room on the page: left, top, right, bottom.
#[derive(Clone, Debug)]
pub struct TextBox {
    /// Left, top, right and bottom in units of the view box.
    pub sides: [f64; 4],
    /// The text.
    pub text: String,
}

impl TextBox {
    /// Whether two texts share a part of the page.
    pub fn meets(&self, other: &Self) -> bool {
        let ([left, top, right, bottom], [l, t, r, b]) = (self.sides, other.sides);
        left < r && l < right && top < b && t < bottom
    }
}

/// Above the base line and below it, as parts of the font's size.
const ASCENT: f64 = 0.93;
const DESCENT: f64 = 0.24;

/// Where a text begins, has its middle, or ends at its x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// It begins there.
    Start,
    /// Its middle is there.
    Middle,
    /// It ends there.
    End,
}

impl Anchor {
    /// Its name in SVG.
    pub fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Middle => "middle",
            Self::End => "end",
        }
    }
}

/// The room of a text with its base line at `y`.
pub fn room(x: f64, y: f64, size: f64, anchor: Anchor, text: &str) -> TextBox {
    let width = width(text, size);
    let left = match anchor {
        Anchor::Start => x,
        Anchor::Middle => x - width / 2.0,
        Anchor::End => x - width,
    };
    TextBox { sides: [left, y - ASCENT * size, left + width, y + DESCENT * size], text: text.to_owned() }
}

/// How wide a text of that size is at most. DejaVu Sans is the widest of the usual fonts; these are its widths.
pub fn width(text: &str, size: f64) -> f64 {
    text.chars().map(em).sum::<f64>() * size
}

fn em(c: char) -> f64 {
    match c {
        ' ' => 0.32,
        'i' | 'l' | 'j' | '.' | ',' | ':' | ';' | '\'' | '|' => 0.34,
        'f' | 't' | 'r' | 'I' | '(' | ')' | '[' | ']' | '/' | '-' | '"' | '·' => 0.42,
        '0'..='9' | 's' | 'c' | 'k' | 'v' | 'x' | 'y' | 'z' | 'J' => 0.64,
        'm' | 'W' | '@' | '%' => 0.99,
        'w' | 'M' | 'O' | 'Q' | '+' | '=' | '<' | '>' | '~' | '×' | '÷' | '→' | '–' => 0.88,
        'a'..='z' | 'L' | 'T' | 'µ' => 0.64,
        'A'..='Z' => 0.78,
        _ => 0.9,
    }
}

/// Breaks a text into lines of at most `room`: between words, and inside a word that is longer than a line.
pub fn wrap(text: &str, size: f64, room: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for piece in text.split_whitespace().flat_map(|word| cut(word, size, room)) {
        match lines.last_mut() {
            Some(line) if width(line, size) + width(" ", size) + width(&piece, size) <= room => {
                line.push(' ');
                line.push_str(&piece);
            }
            _ => lines.push(piece),
        }
    }
    lines
}

/// A word in pieces that are no wider than `room`, each of one character at least.
fn cut(word: &str, size: f64, room: f64) -> Vec<String> {
    let mut pieces = vec![String::new()];
    for c in word.chars() {
        let last = pieces.last().map_or("", String::as_str);
        if !last.is_empty() && width(last, size) + em(c) * size > room {
            pieces.push(String::new());
        }
        pieces.last_mut().expect("there is one").push(c);
    }
    pieces
}

/// Moves places apart until each is `gap` from the next, between `low` and `high`, and keeps their order. What does not fit
/// goes past `high`.
pub fn spread(wanted: &[f64], gap: f64, low: f64, high: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|a, b| wanted[*a].total_cmp(&wanted[*b]));
    let mut places: Vec<f64> = order.iter().map(|number| wanted[*number].clamp(low, high)).collect();
    // First down the page, and what came too far down then pushes the others up again.
    for at in 1..places.len() {
        places[at] = places[at].max(places[at - 1] + gap);
    }
    if let Some(last) = places.last_mut() {
        *last = last.min(high.max(low + gap * (wanted.len() - 1) as f64));
    }
    for at in (1..places.len()).rev() {
        places[at - 1] = places[at - 1].min(places[at] - gap);
    }
    let mut result = vec![0.0; wanted.len()];
    order.into_iter().zip(places).for_each(|(number, place)| result[number] = place);
    result
}

/// Replaces what may not be in XML.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // No other control character may be in XML.
            c if c.is_control() => out.push(' '),
            // A name shows as it is written, in any direction.
            c if is_unseen(c) => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_moved_apart_and_keep_their_order() {
        assert_eq!(spread(&[10.0, 50.0], 13.0, 0.0, 100.0), [10.0, 50.0]);
        assert_eq!(spread(&[50.0, 50.0, 49.0], 13.0, 0.0, 100.0), [62.0, 75.0, 49.0]);
        assert_eq!(spread(&[99.0, 100.0, 98.0], 13.0, 0.0, 100.0), [87.0, 100.0, 74.0]);
        assert_eq!(spread(&[5.0, 5.0, 5.0], 13.0, 0.0, 10.0), [0.0, 13.0, 26.0]);
        assert!(spread(&[], 13.0, 0.0, 10.0).is_empty());
    }

    #[test]
    fn lines_are_broken_between_words() {
        assert_eq!(wrap("aa bb cc", 10.0, width("aa bb", 10.0)), ["aa bb", "cc"]);
        assert_eq!(wrap("aaaaaa b", 10.0, width("aaaa", 10.0) + 0.1), ["aaaa", "aa b"]);
        assert_eq!(wrap("ab", 10.0, 0.0), ["a", "b"]);
        assert!(wrap("", 10.0, 20.0).is_empty());
    }

    #[test]
    fn texts_meet_when_they_share_a_part_of_the_page() {
        let text = |x, y| room(x, y, 10.0, Anchor::Start, "abc");
        assert!(text(0.0, 0.0).meets(&text(5.0, 5.0)));
        assert!(!text(0.0, 0.0).meets(&text(0.0, 12.0)) && !text(0.0, 0.0).meets(&text(30.0, 0.0)));
    }
}
