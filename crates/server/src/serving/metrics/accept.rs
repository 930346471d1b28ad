//! Which format a caller wants, by its header `accept` (RFC 9110, section 12.5.1).

/// A format of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Prometheus's protobuf exposition. Native histograms are in this format alone.
    Protobuf,
    /// OpenMetrics text, 1.0.0.
    OpenMetrics,
    /// Prometheus's text, 0.0.4.
    Text,
}

impl Format {
    /// The format, as the header `content-type` has it.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Protobuf => {
                "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
            }
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// The format that one entry of the header means, with how much it is wanted: `TYPE/SUBTYPE;parameter=value;q=0.5`.
    fn parse(entry: &str) -> Option<(Self, f64)> {
        let mut parts = entry.split(';').map(str::trim);
        let kind = parts.next()?.to_ascii_lowercase();
        let parameters: Vec<_> = parts.filter_map(|part| part.split_once('=')).collect();
        let parameter = |name: &str| {
            let found = parameters.iter().find(|(other, _)| other.trim().eq_ignore_ascii_case(name));
            found.map(|(_, value)| value.trim().trim_matches('"'))
        };
        let is = |name, wanted: &str| parameter(name).is_none_or(|value| value == wanted);
        let format = match kind.as_str() {
            "application/vnd.google.protobuf" => {
                let is_ours = is("proto", "io.prometheus.client.MetricFamily") && is("encoding", "delimited");
                is_ours.then_some(Self::Protobuf)
            }
            "application/openmetrics-text" => is("version", "1.0.0").then_some(Self::OpenMetrics),
            "text/plain" => is("version", "0.0.4").then_some(Self::Text),
            "text/*" | "*/*" => Some(Self::Text),
            _ => None,
        };
        let wanted = parameter("q").map_or(Some(1.0), |q| q.parse().ok())?;
        format.map(|format| (format, wanted)).filter(|(_, wanted)| *wanted > 0.0)
    }
}

/// The format that is wanted most; of several, the one that is named first. Text for whoever wants nothing that there is: every tool reads it.
pub fn choose(accept: &str) -> Format {
    let wanted = accept.split(',').filter_map(Format::parse);
    let best = wanted.fold(None, |best: Option<(Format, f64)>, next| match best {
        Some(best) if best.1 >= next.1 => Some(best),
        _ => Some(next),
    });
    best.map_or(Format::Text, |(format, _)| format)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_caller_gets_what_it_wants_most() {
        let classic = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                       text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let native = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited,\
                      application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let third = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                     text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.7,*/*;q=0.2";
        let cases = [
            (classic, Format::OpenMetrics),
            (native, Format::Protobuf),
            (third, Format::Text),
            ("", Format::Text),
            ("*/*", Format::Text),
            ("application/json", Format::Text),
            ("text/plain;q=0, application/openmetrics-text; Version=\"1.0.0\"", Format::OpenMetrics),
            ("application/vnd.google.protobuf;encoding=text, text/plain;q=0.1", Format::Text),
            ("application/openmetrics-text;version=2.0.0", Format::Text),
            ("application/openmetrics-text;q=x,text/plain;q=0.001", Format::Text),
            ("TEXT/PLAIN;q=0.5,application/openmetrics-text;q=0.6", Format::OpenMetrics),
        ];
        for (accept, format) in cases {
            assert_eq!(choose(accept), format, "{accept}");
        }
    }
}
