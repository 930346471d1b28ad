use super::*;

const SIZES: [u64; 14] = [
    512,
    1 << 10,
    2 << 10,
    4 << 10,
    8 << 10,
    16 << 10,
    32 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    2 << 20,
    4 << 20,
];

/// Lines of all paths, close to each other.
fn lines(points: usize) -> Panel {
    let names: Vec<&str> = crate::experiments::paths::all_kinds().into_iter().map(|kind| kind.name()).collect();
    let point = |size: &u64| Point::new(*size as f64, 1.0).within(0.5, 1.5);
    let series = names.iter().zip(styles(names.iter().copied())).map(|(name, style)| Series {
        name: (*name).to_owned(),
        style,
        points: SIZES[..points].iter().map(point).collect(),
    });
    let y = Axis::ratios("ratio to grant-copy", [2.0].into_iter());
    let marks = Marks::Series { x: Axis::sizes("request", &SIZES), y, series: series.collect(), reference: Some(1.0) };
    Panel { title: "lines".into(), marks }
}

fn bars() -> Panel {
    let bar = |name: &str| Bar {
        name: name.into(),
        note: "3 µs".into(),
        parts: vec![(1.0, part(0)), (2.0, part(1))],
        spread: Some((2.5, 3.2)),
    };
    let bars = ["grant-map-memcpy-indirect", "nbd"].map(bar).to_vec();
    Panel { title: "bars".into(), marks: Marks::Bars { x: Axis::linear("µs", 4.0), bars, reference: Some(1.0) } }
}

fn heat() -> Panel {
    let names = |count: usize| SIZES[..count].iter().map(|size| spile_server::units::format_size(*size)).collect();
    let values =
        (0..10).map(|row| (0..14).map(|column| (row + column < 14).then_some(f64::from(row * column))).collect());
    let heat = Heat {
        x: "request".into(),
        columns: names(14),
        y: "outstanding".into(),
        rows: names(10),
        value: "MB/s (10^6 bytes)".into(),
        values: values.collect(),
    };
    Panel { title: "heat".into(), marks: Marks::Heat(heat) }
}

fn figure(panels: Vec<Panel>) -> Figure {
    let keys = vec![("a < b & \"c\"".to_owned(), part(0)), ("d".to_owned(), part(1))];
    let note = "how it was made, at some length, so that it has to be broken into several lines of text\u{1}".into();
    Figure { title: "title <1>".into(), note, mark: Some(QUICK.into()), panels, columns: 2, keys }
}

/// Every tag is closed by its own name, attributes are quoted, and nothing else is in brackets.
fn assert_well_formed(svg: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = svg;
    while let Some(at) = rest.find('<') {
        assert!(!rest[..at].contains('>'), "a bracket in the text: {}", &rest[..at]);
        let end = at + rest[at..].find('>').expect("the tag ends");
        let tag = &rest[at + 1..end];
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
        match (tag.starts_with('/'), tag.ends_with('/')) {
            (true, _) => assert_eq!(open.pop(), Some(name)),
            (false, false) => open.push(name),
            (false, true) => {}
        }
        rest = &rest[end + 1..];
    }
    assert!(open.is_empty() && rest.trim().is_empty(), "{open:?} {rest}");
    assert!(!svg.contains("NaN") && !svg.contains("inf") && !svg.chars().any(|c| c.is_control() && c != '\n'));
}

#[test]
fn figures_are_well_formed() {
    for panels in [vec![], vec![lines(14)], vec![lines(14), bars(), heat()]] {
        let figure = figure(panels);
        let svg = figure.to_svg();
        assert_well_formed(&svg);
        assert!(svg.contains("a &lt; b &amp; &quot;c&quot;") && svg.contains(">title &lt;1&gt;</title>"));
        figure.to_elements("one").iter().for_each(|element| assert_well_formed(element));
    }
}

#[test]
fn no_text_overlaps_another_or_leaves_the_page() {
    for columns in 1..4 {
        let panels = vec![lines(14), lines(2), bars(), heat(), heat()];
        let figure = Figure { columns, ..figure(panels) };
        assert_eq!(figure.faults(), Vec::<String>::new());
    }
}

#[test]
fn faults_are_found() {
    let text = |x| text::room(x, 20.0, SMALL, Anchor::Start, "text");
    assert_eq!(faults(&[text(1.0), text(5.0)], (100.0, 100.0)), ["`text` overlaps `text`"]);
    assert_eq!(faults(&[text(-1.0)], (100.0, 100.0)), ["`text` leaves the page"]);
    assert!(faults(&[text(1.0), text(50.0)], (100.0, 100.0)).is_empty());
}

#[test]
fn two_points_are_not_joined() {
    let lines_of = |svg: &str| svg.matches("stroke-linejoin").count();
    let all = crate::experiments::paths::all_kinds().len();
    assert_eq!(lines_of(&figure(vec![lines(2)]).to_svg()), 0);
    assert_eq!(lines_of(&figure(vec![lines(3)]).to_svg()), all);
    // Whiskers or bands, but not both.
    assert_eq!(figure(vec![lines(2)]).to_svg().matches("opacity").count(), 0);
    assert_eq!(figure(vec![lines(3)]).to_svg().matches("opacity").count(), all);
}

#[test]
fn bars_are_stacked() {
    let svg = figure(vec![bars()]).to_svg();
    let widths: Vec<f64> = svg
        .lines()
        .filter(|line| line.starts_with("<rect x") && line.contains("class=\"m "))
        .map(|line| line.split("width=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap())
        .collect();
    assert_eq!(widths.len(), 4);
    assert!((widths[1] - 2.0 * widths[0]).abs() < 0.3, "{widths:?}");
}

#[test]
fn a_screen_reader_is_told_what_is_drawn() {
    let svg = figure(vec![lines(14), bars(), heat()]).to_svg();
    let desc = svg.split("<desc").nth(1).unwrap().split("</desc>").next().unwrap();
    for part in [QUICK, "ratio to grant-copy by request", "nbd: 1 at 512 B, 1 at 4 MiB", "nbd 3 µs", "Most: 42"] {
        assert!(desc.contains(part), "{part} is not in {desc}");
    }
    assert!(svg.contains("role=\"img\" aria-labelledby=\"figure-title figure-desc\""));
}

#[test]
fn values_past_an_end_stay_in_the_panel() {
    let mut panel = lines(14);
    if let Marks::Series { y, .. } = &mut panel.marks {
        *y = Axis::linear("GB/s", 0.5);
    }
    let svg = figure(vec![panel]).to_svg();
    assert_well_formed(&svg);
    let points = crate::experiments::paths::all_kinds().len() * 14;
    assert_eq!((svg.matches("class=\"beyond ").count(), svg.matches(", beyond the axis<").count()), (points, points));
    assert_eq!(figure(vec![lines(14)]).to_svg().matches("beyond").count(), 0);
}
