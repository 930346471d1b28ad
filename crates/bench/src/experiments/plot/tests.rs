use super::*;

fn lines() -> Panel {
    let line = Line { colour: colour(0), is_dashed: true, points: vec![(512.0, 1.0), (1024.0, 2.0)] };
    let x = Axis::sizes("request", &[512, 1024]);
    Panel { title: "lines".into(), marks: Marks::Lines(x, vec![line]), y: Axis::linear("GB/s", 2.0) }
}

fn bars() -> Panel {
    let bar = Bar { label: "4 KiB".into(), note: "3 µs".into(), parts: vec![(1.0, colour(0)), (2.0, colour(1))] };
    Panel { title: "bars".into(), marks: Marks::Bars("request".into(), vec![bar]), y: Axis::linear("µs", 4.0) }
}

fn figure(panels: Vec<Panel>) -> Figure {
    let legend = vec![("a < b & \"c\"".to_owned(), colour(0)), ("d".to_owned(), colour(1))];
    Figure { title: "title <1>".into(), note: "note\u{1}".into(), panels, columns: 2, legend }
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
    for panels in [vec![], vec![lines()], vec![lines(), bars(), lines()]] {
        let svg = figure(panels).to_svg();
        assert_well_formed(&svg);
        assert!(svg.contains("a &lt; b &amp; &quot;c&quot;") && svg.contains("<title>title &lt;1&gt;</title>"));
    }
}

#[test]
fn bars_are_stacked() {
    let svg = figure(vec![bars()]).to_svg();
    let heights: Vec<f64> = svg
        .lines()
        .filter(|line| line.starts_with("<rect x") && line.contains("width=\"260.6"))
        .map(|line| line.split("height=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap())
        .collect();
    assert_eq!(heights.len(), 2);
    assert!((heights[1] / heights[0] - 2.0).abs() < 0.01, "{heights:?}");
}

#[test]
fn what_has_no_room_is_left_out() {
    assert_eq!(stride(["4 KiB"].into_iter(), 10.0, 100.0), 1);
    assert_eq!(stride(["128 KiB", "1"].into_iter(), 10.0, 30.0), 2);
    assert_eq!(stride([].into_iter(), 10.0, 30.0), 1);
}

#[test]
fn values_past_an_end_stay_in_the_panel() {
    let mut panel = lines();
    panel.y = Axis::linear("GB/s", 1.0);
    assert_well_formed(&figure(vec![panel]).to_svg());
}
