//! Numbers, widths and characters, for terminals that can show more or less.

use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};

use crate::log::printable;
use crate::units::format_us;

/// What a terminal can show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ink {
    /// Colours. Nothing is said by a colour alone.
    pub color: bool,
    /// Characters beyond ASCII.
    pub unicode: bool,
}

const SPARKS: [[char; 8]; 2] = [['_', '.', '-', '~', '=', '+', '*', '#'], ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█']];
const SHADES: [[char; 5]; 2] = [[' ', '.', 'o', 'O', '#'], [' ', '░', '▒', '▓', '█']];

impl Ink {
    /// What the environment says of the terminal: `NO_COLOR` (no-color.org), `TERM`, and the locale's encoding.
    pub fn of_environment(variable: impl Fn(&str) -> Option<String>) -> Self {
        let variable = |name: &str| variable(name).filter(|text| !text.is_empty());
        let term = variable("TERM").unwrap_or_default();
        let monochrome = term.starts_with("vt") || ["-m", "-mono", "dumb"].iter().any(|end| term.ends_with(end));
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(variable).unwrap_or_default().to_lowercase();
        Self {
            color: variable("NO_COLOR").is_none() && !monochrome,
            unicode: locale.contains("utf-8") || locale.contains("utf8"),
        }
    }

    /// This colour, or none.
    pub fn style(self, color: Color) -> Style {
        if self.color { Style::new().fg(color) } else { Style::new() }
    }

    /// What stands out: the head of a list, the chosen line.
    pub fn reversed(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    /// Numbers as a line of bars, the highest as high as a character.
    pub fn sparkline(self, numbers: impl Iterator<Item = f64> + Clone) -> String {
        let highest = numbers.clone().fold(0.0, f64::max);
        let sparks = SPARKS[usize::from(self.unicode)];
        numbers.map(|number| sparks[(number / highest * 7.0).round().clamp(0.0, 7.0) as usize]).collect()
    }

    /// A character as dark as `share` (0 to 1), and its colour. What is not zero is never blank.
    pub fn shade(self, share: f64) -> Span<'static> {
        let level = if share > 0.0 { ((share.sqrt() * 4.0).ceil() as usize).clamp(1, 4) } else { 0 };
        let colors = [Color::Reset, Color::Blue, Color::Cyan, Color::Yellow, Color::Red];
        Span::styled(SHADES[usize::from(self.unicode)][level].to_string(), self.style(colors[level]))
    }

    /// A latency, or a dash where there is none.
    pub fn time(self, us: Option<f64>) -> String {
        let text = us.map_or_else(|| "-".to_owned(), format_us);
        if self.unicode { text } else { text.replace('µ', "u") }
    }

    /// A line of text that the terminal can show.
    pub fn line(self, text: &str) -> Line<'static> {
        Line::from(self.fitted(text, columns(&printable(text))))
    }

    /// A name in exactly so many columns. Control characters are escaped, what is too long is cut, and what the terminal cannot
    /// show is a question mark.
    pub fn fitted(self, name: &str, width: usize) -> String {
        let name: String =
            printable(name).chars().map(|c| if self.unicode || c.is_ascii() { c } else { '?' }).collect();
        if columns(&name) <= width {
            return format!("{name}{}", " ".repeat(width - columns(&name)));
        }
        let end = if self.unicode { '…' } else { '~' };
        let mut cut = String::new();
        for character in name.chars() {
            if columns(&cut) + columns(&character.to_string()) >= width {
                break;
            }
            cut.push(character);
        }
        if width > 0 {
            cut.push(end);
        }
        format!("{cut}{}", " ".repeat(width.saturating_sub(columns(&cut))))
    }
}

/// How many columns a text takes on a terminal.
pub fn columns(text: &str) -> usize {
    Span::raw(text).width()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: Ink = Ink { color: true, unicode: true };
    const PLAIN: Ink = Ink { color: false, unicode: false };

    #[test]
    fn the_environment_says_what_a_terminal_can_show() {
        let of = |pairs: &[(&str, &str)]| {
            let find = |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            Ink::of_environment(find)
        };
        assert_eq!(of(&[("TERM", "xterm-256color"), ("LANG", "C.UTF-8")]), FULL);
        assert_eq!(of(&[("TERM", "xterm"), ("LANG", "de_DE.utf8"), ("NO_COLOR", "1")]), Ink { color: false, ..FULL });
        assert_eq!(
            of(&[("TERM", "xterm"), ("NO_COLOR", ""), ("LANG", "en_US.UTF-8"), ("LC_ALL", "C")]),
            Ink { unicode: false, ..FULL }
        );
        assert_eq!(of(&[("TERM", "vt100")]), PLAIN);
        assert_eq!(of(&[("TERM", "xterm-mono")]), PLAIN);
    }

    #[test]
    fn numbers_become_bars_and_shades() {
        assert_eq!(FULL.sparkline([0.0, 50.0, 100.0].into_iter()), "▁▅█");
        assert_eq!(PLAIN.sparkline([0.0, 50.0, 100.0].into_iter()), "_=#");
        assert_eq!(FULL.sparkline([0.0, 0.0].into_iter()), "▁▁");
        let shades: String = [0.0, 0.000_1, 0.2, 0.5, 1.0].map(|share| FULL.shade(share).content.to_string()).concat();
        assert_eq!(shades, " ░▒▓█");
        assert_eq!(PLAIN.shade(1.0).style, Style::new());
    }

    #[test]
    fn names_fit_whatever_they_are() {
        assert_eq!(FULL.fitted("boot", 6), "boot  ");
        assert_eq!(FULL.fitted("a-long-name", 6), "a-lon…");
        assert_eq!(PLAIN.fitted("größe", 6), "gr??e ");
        assert_eq!(FULL.fitted("磁盘磁盘", 6), "磁盘… ");
        assert_eq!(FULL.fitted("\u{1b}[2J", 9), "\\u{1b}[2J");
        assert_eq!(FULL.fitted("abc", 0), "");
        assert_eq!((PLAIN.time(Some(137.0)), FULL.time(None)), ("137 us".to_owned(), "-".to_owned()));
    }
}
