//! The two forms in which metrics are shown, and which of them is asked for.
//!
//! What the registry prints is OpenMetrics without units. Units follow from the names, which end in them. In the older
//! text format a family of counters is called as its samples are, information is a gauge, and nothing marks the end.

use std::borrow::Cow;

/// Units that names of metrics end in: base units, as Prometheus has them.
const UNITS: [&str; 2] = ["_bytes", "_seconds"];
const END: &str = "# EOF";

/// A form in which metrics are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsFormat {
    /// The text format of Prometheus, version 0.0.4.
    Text,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
}

impl MetricsFormat {
    /// What an `Accept` header asks for (RFC 9110, section 12.5.1): OpenMetrics where that is preferred, or as good as
    /// the text format; the text format for whoever says nothing, and for whoever takes neither.
    pub fn accepted(accept: &str) -> Self {
        let (mut text, mut open_metrics) = (0.0_f32, 0.0_f32);
        for range in accept.split(',') {
            let mut parts = range.split(';').map(str::trim);
            let media = parts.next().unwrap_or_default().to_ascii_lowercase();
            let (mut weight, mut version) = (1.0, "");
            for (name, value) in parts.filter_map(|parameter| parameter.split_once('=')) {
                match name.to_ascii_lowercase().as_str() {
                    "q" => weight = value.parse().unwrap_or(0.0),
                    "version" => version = value.trim_matches('"'),
                    _ => {}
                }
            }
            match media.as_str() {
                "application/openmetrics-text" if matches!(version, "" | "1.0.0") => {
                    open_metrics = open_metrics.max(weight);
                }
                "text/plain" | "text/*" | "*/*" => text = text.max(weight),
                _ => {}
            }
        }
        if open_metrics > 0.0 && open_metrics >= text { Self::OpenMetrics } else { Self::Text }
    }

    /// The `Content-Type` of a page.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// The page of what the registry has printed.
    pub(super) fn page(self, printed: &str) -> String {
        let mut page = String::with_capacity(printed.len() + printed.len() / 4);
        let mut help = "";
        for line in printed.lines() {
            if let Some((_name, text)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
                help = text;
            } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
                self.describe(&mut page, name, kind, help);
            } else if self == Self::OpenMetrics || line != END {
                page.push_str(line);
                page.push('\n');
            }
        }
        page
    }

    /// The lines before the samples of a family.
    fn describe(self, page: &mut String, name: &str, kind: &str, help: &str) {
        let (shown, kind) = match (self, kind) {
            (Self::Text, "counter") => (Cow::Owned(format!("{name}_total")), kind),
            (Self::Text, "info") => (Cow::Owned(format!("{name}_info")), "gauge"),
            _ => (Cow::Borrowed(name), kind),
        };
        page.push_str(&format!("# HELP {shown} {help}\n# TYPE {shown} {kind}\n"));
        let unit = UNITS.iter().find(|unit| name.ends_with(**unit)).filter(|_| self == Self::OpenMetrics);
        if let Some(unit) = unit {
            page.push_str(&format!("# UNIT {shown} {}\n", unit.trim_start_matches('_')));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_is_the_one_that_is_asked_for() {
        let prometheus_2 = "application/openmetrics-text;version=1.0.0,\
            application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let prometheus_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
            application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,\
            text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for accept in [
            prometheus_2,
            prometheus_3,
            "application/openmetrics-text",
            "Application/OpenMetrics-Text; Version=\"1.0.0\"",
            "text/plain, application/openmetrics-text",
        ] {
            assert_eq!(MetricsFormat::accepted(accept), MetricsFormat::OpenMetrics, "{accept}");
        }
        for accept in [
            "",
            "*/*",
            "text/html",
            "text/plain;version=0.0.4",
            "application/openmetrics-text;version=9.0.0",
            "application/openmetrics-text;q=0",
            "application/openmetrics-text;q=nonsense",
            "application/openmetrics-text;q=0.2,text/*;q=0.3",
        ] {
            assert_eq!(MetricsFormat::accepted(accept), MetricsFormat::Text, "{accept}");
        }
    }

    #[test]
    fn families_are_called_as_each_form_has_them() {
        let printed = "# HELP a_read_bytes Bytes.\n# TYPE a_read_bytes counter\na_read_bytes_total{x=\"# EOF\"} 3\n\
            # HELP a_build What.\n# TYPE a_build info\na_build_info{role=\"r\"} 1\n\
            # HELP a_files Files.\n# TYPE a_files gauge\na_files 7\n# EOF\n";
        assert_eq!(
            MetricsFormat::Text.page(printed),
            "# HELP a_read_bytes_total Bytes.\n# TYPE a_read_bytes_total counter\na_read_bytes_total{x=\"# EOF\"} 3\n\
            # HELP a_build_info What.\n# TYPE a_build_info gauge\na_build_info{role=\"r\"} 1\n\
            # HELP a_files Files.\n# TYPE a_files gauge\na_files 7\n"
        );
        assert_eq!(
            MetricsFormat::OpenMetrics.page(printed),
            printed.replace("_bytes counter\n", "_bytes counter\n# UNIT a_read_bytes bytes\n")
        );
    }
}
