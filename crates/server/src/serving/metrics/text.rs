//! The two text formats: OpenMetrics 1.0.0, and Prometheus's own, 0.0.4.

use std::fmt::Write as _;

use super::families::{Family, Histogram, Kind, Label, Series};

/// Prometheus's text format, 0.0.4.
pub fn prometheus(families: &[Family]) -> String {
    let mut out = String::new();
    for family in families {
        head(&mut out, family, family.name());
        family.series.iter().for_each(|series| sample(&mut out, family, series));
    }
    out
}

/// The OpenMetrics text format, 1.0.0: a counter's family has no `_total`, units are named, and the end is marked.
pub fn open_metrics(families: &[Family]) -> String {
    let mut out = String::new();
    for family in families {
        let base = match family.kind() {
            Kind::Counter => family.name().strip_suffix("_total").unwrap_or(family.name()),
            _ => family.name(),
        };
        head(&mut out, family, base);
        if let Some(unit) = ["seconds", "bytes"].into_iter().find(|unit| base.ends_with(&format!("_{unit}"))) {
            line(&mut out, format_args!("# UNIT {base} {unit}"));
        }
        family.series.iter().for_each(|series| sample(&mut out, family, series));
    }
    out.push_str("# EOF\n");
    out
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = out.write_fmt(text);
    out.push('\n');
}

fn head(out: &mut String, family: &Family, name: &str) {
    let kind = match family.kind() {
        Kind::Counter => "counter",
        Kind::Gauge => "gauge",
        Kind::Histogram => "histogram",
    };
    line(out, format_args!("# HELP {name} {}", escape_line(family.help())));
    line(out, format_args!("# TYPE {name} {kind}"));
}

fn sample(out: &mut String, family: &Family, series: &Series) {
    let name = family.name();
    match &series.histogram {
        Some(histogram) => buckets(out, name, &series.labels, histogram),
        None => {
            let number = series.counter.or(series.gauge).and_then(|number| number.value).unwrap_or_default();
            line(out, format_args!("{name}{} {number}", labels(&series.labels, None)));
        }
    }
}

fn buckets(out: &mut String, name: &str, own: &[Label], histogram: &Histogram) {
    for bucket in &histogram.buckets {
        let le = bound(bucket.upper_bound.unwrap_or_default());
        let count = bucket.cumulative_count.unwrap_or_default();
        line(out, format_args!("{name}_bucket{} {count}", labels(own, Some(&le))));
    }
    let (count, sum) = (histogram.count.unwrap_or_default(), histogram.sum.unwrap_or_default());
    line(out, format_args!("{name}_bucket{} {count}", labels(own, Some("+Inf"))));
    line(out, format_args!("{name}_sum{} {sum}", labels(own, None)));
    line(out, format_args!("{name}_count{} {count}", labels(own, None)));
}

/// A bound as Prometheus itself writes it (Go's %g), so that a series is the same one whichever format it came by.
fn bound(value: f64) -> String {
    let text = format!("{value:e}");
    match text.split_once("e-") {
        Some((digits, exponent)) if value < 1e-4 => format!("{digits}e-{exponent:0>2}"),
        _ if value.fract() == 0.0 => format!("{value:.1}"),
        _ => value.to_string(),
    }
}

fn labels(own: &[Label], le: Option<&str>) -> String {
    let own = own.iter().map(|label| (label.name.as_deref(), label.value.as_deref()));
    let all = own.chain(le.map(|le| (Some("le"), Some(le))));
    let all: Vec<_> = all
        .map(|(name, value)| format!("{}=\"{}\"", name.unwrap_or_default(), escape(value.unwrap_or_default())))
        .collect();
    if all.is_empty() { String::new() } else { format!("{{{}}}", all.join(",")) }
}

/// The value of a label.
fn escape(text: &str) -> String {
    escape_line(text).replace('"', "\\\"")
}

/// A help text: quotes stay as they are.
fn escape_line(text: &str) -> String {
    text.replace('\\', "\\\\").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::super::families::{Bucket, Families, Value};
    use super::*;

    fn families() -> Vec<Family> {
        let mut families = Families::default();
        let label = [Label::new("disk", "a\"b\\c\nd")];
        families.add("x_bytes_total", "All of it.", &label, Value::Counter(17e15));
        families.add("y", "Now.", &[], Value::Gauge(-0.25));
        let buckets = [(1.024e-6, 1), (0.001, 2), (2.0, 3)];
        let buckets = buckets.map(|(bound, count)| Bucket { cumulative_count: Some(count), upper_bound: Some(bound) });
        let histogram = Histogram { count: Some(4), sum: Some(9.5), buckets: buckets.to_vec(), ..Histogram::default() };
        families.add("z_seconds", "Times.", &[Label::new("op", "read")], Value::Histogram(histogram));
        families.into_vec()
    }

    const HISTOGRAM: &str = "z_seconds_bucket{op=\"read\",le=\"1.024e-06\"} 1
z_seconds_bucket{op=\"read\",le=\"0.001\"} 2
z_seconds_bucket{op=\"read\",le=\"2.0\"} 3
z_seconds_bucket{op=\"read\",le=\"+Inf\"} 4
z_seconds_sum{op=\"read\"} 9.5
z_seconds_count{op=\"read\"} 4
";

    #[test]
    fn prometheus_text() {
        let expected = format!(
            "# HELP x_bytes_total All of it.
# TYPE x_bytes_total counter
x_bytes_total{{disk=\"a\\\"b\\\\c\\nd\"}} 17000000000000000
# HELP y Now.
# TYPE y gauge
y -0.25
# HELP z_seconds Times.
# TYPE z_seconds histogram
{HISTOGRAM}"
        );
        assert_eq!(prometheus(&families()), expected);
    }

    #[test]
    fn open_metrics_text() {
        let expected = format!(
            "# HELP x_bytes All of it.
# TYPE x_bytes counter
# UNIT x_bytes bytes
x_bytes_total{{disk=\"a\\\"b\\\\c\\nd\"}} 17000000000000000
# HELP y Now.
# TYPE y gauge
y -0.25
# HELP z_seconds Times.
# TYPE z_seconds histogram
# UNIT z_seconds seconds
{HISTOGRAM}# EOF
"
        );
        assert_eq!(open_metrics(&families()), expected);
    }
}
