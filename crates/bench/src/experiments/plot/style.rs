//! How each path looks: one colour and one marker for each name, in every figure.

/// The shape of a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marker {
    /// A filled circle.
    Circle,
    /// A circle's outline.
    Ring,
    /// A filled square.
    Square,
    /// A square's outline.
    Frame,
    /// A triangle that stands on its side.
    Triangle,
    /// A triangle that stands on its tip.
    Down,
    /// A square on its tip.
    Diamond,
    /// Two crossing lines, oblique.
    Cross,
    /// Two crossing lines, upright.
    Plus,
}

/// The look of a series: a colour of [`INKS`], a marker, and whether its line is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// The place in [`INKS`].
    pub ink: usize,
    /// The shape of its points.
    pub marker: Marker,
    /// Its line is broken.
    pub is_dashed: bool,
}

/// A colour on light and on dark ground, for marks and for texts. Texts need more contrast.
pub struct Ink {
    /// Marks on a light ground.
    pub light: &'static str,
    /// Marks on a dark ground.
    pub dark: &'static str,
    /// Texts on a light ground.
    pub light_text: &'static str,
    /// Texts on a dark ground.
    pub dark_text: &'static str,
}

const fn ink(light: &'static str, dark: &'static str, light_text: &'static str, dark_text: &'static str) -> Ink {
    Ink { light, dark, light_text, dark_text }
}

/// The colours of Okabe and Ito, which people with any kind of sight can tell apart, and a few more.
pub const INKS: [Ink; 10] = [
    ink("#0072b2", "#4aa3df", "#0068a3", "#6cb6e8"),
    ink("#d55e00", "#ff8a3d", "#b04e00", "#ff9a57"),
    ink("#009e73", "#2fc296", "#00755a", "#3fcfa4"),
    ink("#cc79a7", "#e08fc0", "#a0457b", "#e9a3cc"),
    ink("#e69f00", "#ffc04d", "#865c00", "#ffc861"),
    ink("#56b4e9", "#9adbff", "#1b6fa0", "#a6dfff"),
    ink("#1a1a1a", "#f0f0f0", "#1a1a1a", "#f0f0f0"),
    ink("#7f7f7f", "#a0a0a0", "#636363", "#b4b4b4"),
    ink("#8c6d31", "#cdb27a", "#735819", "#d8c08c"),
    ink("#5b3fc4", "#a493ff", "#4f35b0", "#b3a5ff"),
];

/// The ground of a figure, light and dark.
pub const GROUND: (&str, &str) = ("#ffffff", "#12161c");
/// Texts, light and dark.
pub const TEXT: (&str, &str) = ("#1a1a1a", "#e8e8e8");
/// Texts that stand back, light and dark.
pub const MUTED: (&str, &str) = ("#555555", "#b0b6be");
/// Lines behind the data, light and dark.
const GRID: (&str, &str) = ("#e2e2e2", "#30363f");
/// Axes, light and dark.
const AXIS: (&str, &str) = ("#444444", "#9aa2ac");

/// Steps of a heat map from little to much, light and dark: one hue less, so that they also differ in grey.
pub const HEAT: [(&str, &str); 7] = [
    ("#eef4fa", "#1c2733"),
    ("#cfe1f2", "#1d3f5f"),
    ("#a6cbe7", "#205a8c"),
    ("#6fafda", "#2f7fb8"),
    ("#3b8bc2", "#5aa9db"),
    ("#1a65a5", "#9accf0"),
    ("#0a3f78", "#dff0fc"),
];

/// The names that have a look of their own. `--path`, `--access` and `--shape` call them so.
const KNOWN: &[(&str, usize, Marker)] = &[
    ("host-direct", 6, Marker::Cross),
    ("grant-map-memcpy", 1, Marker::Square),
    ("grant-map-memcpy-indirect", 1, Marker::Frame),
    ("grant-map", 4, Marker::Triangle),
    ("persistent", 3, Marker::Diamond),
    ("grant-copy-44k", 5, Marker::Circle),
    ("grant-copy-44k-split", 5, Marker::Ring),
    ("grant-copy", 0, Marker::Circle),
    ("grant-copy-split", 0, Marker::Ring),
    ("grant-copy-1m", 9, Marker::Down),
    ("vhost-user", 2, Marker::Triangle),
    ("nbd", 8, Marker::Plus),
    ("xen", 0, Marker::Circle),
    ("bare", 6, Marker::Cross),
    ("native", 6, Marker::Cross),
    ("without", 7, Marker::Ring),
    ("with", 0, Marker::Circle),
    ("off", 7, Marker::Ring),
    ("split", 0, Marker::Circle),
    ("merge", 1, Marker::Square),
    ("auto", 2, Marker::Diamond),
    ("file", 1, Marker::Square),
    ("partition", 0, Marker::Circle),
    ("volume", 2, Marker::Triangle),
    ("configured", 6, Marker::Cross),
    ("front", 0, Marker::Circle),
    ("disk", 2, Marker::Diamond),
    ("image", 4, Marker::Triangle),
    ("store", 3, Marker::Square),
    ("client", 6, Marker::Cross),
    ("device", 1, Marker::Down),
    ("host device", 1, Marker::Down),
    ("device by ticks", 7, Marker::Plus),
    ("iostat", 7, Marker::Plus),
    ("read", 0, Marker::Circle),
    ("write", 1, Marker::Square),
    ("kick", 0, Marker::Circle),
    ("completion", 2, Marker::Diamond),
    ("control", 4, Marker::Triangle),
    ("timer", 1, Marker::Square),
    ("memory", 9, Marker::Down),
];

/// Looks for names that are not known, in the order in which they are given out.
const OTHERS: [(usize, Marker); 10] = [
    (0, Marker::Circle),
    (1, Marker::Square),
    (2, Marker::Triangle),
    (3, Marker::Diamond),
    (4, Marker::Down),
    (5, Marker::Ring),
    (8, Marker::Plus),
    (9, Marker::Frame),
    (7, Marker::Cross),
    (6, Marker::Ring),
];

/// The looks of `names`, which stand in one figure. A known name has the same look in every figure; the others take those
/// that are left.
pub fn styles<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<Style> {
    let names: Vec<&str> = names.into_iter().collect();
    let known: Vec<Option<Style>> = names.iter().map(|name| known(name)).collect();
    let is_free = |ink: &usize| !known.iter().flatten().any(|style| style.ink == *ink);
    let mut free = OTHERS.into_iter().filter(|(ink, _)| is_free(ink)).chain(OTHERS.into_iter().cycle());
    let mut other = || free.next().map(|(ink, marker)| Style { ink, marker, is_dashed: false });
    known.iter().filter_map(|style| style.or_else(&mut other)).collect()
}

/// The look of one name.
pub fn style(name: &str) -> Style {
    known(name).unwrap_or(Style { ink: 0, marker: Marker::Circle, is_dashed: false })
}

/// The look of the `number`th part of a whole, such as a phase: parts have no names of their own.
pub fn part(number: usize) -> Style {
    let (ink, marker) = OTHERS[number % OTHERS.len()];
    Style { ink, marker, is_dashed: false }
}

fn known(name: &str) -> Option<Style> {
    let (_, ink, marker) = *KNOWN.iter().find(|(known, ..)| *known == name)?;
    let is_dashed = matches!(marker, Marker::Cross | Marker::Ring | Marker::Frame);
    Some(Style { ink, marker, is_dashed })
}

/// The style sheet of all figures. Every selector names the class `plot`, so a page with figures keeps its own styles.
pub fn sheet() -> String {
    let (mut light, mut dark) = (String::new(), String::new());
    let mut rule = |selector: &str, property: &str, (bright, dim): (&str, &str)| {
        light += &format!(".plot {selector}{{{property}:{bright}}}");
        dark += &format!(".plot {selector}{{{property}:{dim}}}");
    };
    rule(".ground", "fill", GROUND);
    rule("text", "fill", TEXT);
    rule("text.u", "fill", MUTED);
    rule(".g", "stroke", GRID);
    rule(".a", "stroke", AXIS);
    rule(".q", "stroke", INKS_WARN);
    rule("text.w", "fill", INKS_WARN);
    for (number, ink) in INKS.iter().enumerate() {
        rule(&format!(".f{number}"), "fill", (ink.light, ink.dark));
        rule(&format!(".k{number}"), "stroke", (ink.light, ink.dark));
        rule(&format!("text.t{number}"), "fill", (ink.light_text, ink.dark_text));
    }
    for (number, step) in HEAT.iter().enumerate() {
        rule(&format!(".h{number}"), "fill", *step);
    }
    format!(
        ".plot text{{font-family:system-ui,-apple-system,\"Segoe UI\",Roboto,\"DejaVu Sans\",Arial,sans-serif}}\
         {light}@media (prefers-color-scheme:dark){{{dark}}}"
    )
}

/// What warns: a mark such as "quick: few rounds".
const INKS_WARN: (&str, &str) = ("#a33c00", "#ffb26b");

#[cfg(test)]
mod tests {
    use super::*;

    fn luminance(colour: &str) -> f64 {
        let part = |at: usize| f64::from(u8::from_str_radix(&colour[at..at + 2], 16).unwrap()) / 255.0;
        let linear = |c: f64| if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) };
        0.2126 * linear(part(1)) + 0.7152 * linear(part(3)) + 0.0722 * linear(part(5))
    }

    /// As WCAG 2.1 defines it.
    fn contrast(a: &str, b: &str) -> f64 {
        let (a, b) = (luminance(a), luminance(b));
        (a.max(b) + 0.05) / (a.min(b) + 0.05)
    }

    #[test]
    fn texts_have_the_contrast_that_wcag_asks_for() {
        let of_inks = INKS.iter().map(|ink| (ink.light_text, ink.dark_text));
        for (light, dark) in of_inks.chain([TEXT, MUTED, INKS_WARN]) {
            assert!(contrast(light, GROUND.0) >= 4.5, "{light} on {}: {}", GROUND.0, contrast(light, GROUND.0));
            assert!(contrast(dark, GROUND.1) >= 4.5, "{dark} on {}: {}", GROUND.1, contrast(dark, GROUND.1));
        }
    }

    #[test]
    fn steps_of_heat_differ_in_grey() {
        let light: Vec<f64> = HEAT.iter().map(|(light, _)| luminance(light)).collect();
        let dark: Vec<f64> = HEAT.iter().map(|(_, dark)| luminance(dark)).collect();
        assert!(light.is_sorted_by(|a, b| a > b) && dark.is_sorted_by(|a, b| a < b), "{light:?} {dark:?}");
    }

    #[test]
    fn every_path_of_the_experiments_has_its_own_look() {
        let names: Vec<&str> = crate::experiments::paths::all_kinds().into_iter().map(|kind| kind.name()).collect();
        let looks: Vec<Style> = names.iter().map(|name| known(name).expect(name)).collect();
        for (number, look) in looks.iter().enumerate() {
            let same = looks.iter().filter(|other| (other.ink, other.marker) == (look.ink, look.marker)).count();
            assert_eq!(same, 1, "{} looks like another path", names[number]);
        }
    }

    #[test]
    fn a_name_keeps_its_look_and_others_take_what_is_left() {
        let looks = styles(["something", "grant-copy", "else"]);
        assert_eq!(looks[1], style("grant-copy"));
        assert!(looks[0].ink != looks[1].ink && looks[2].ink != looks[1].ink && looks[0].ink != looks[2].ink);
    }
}
