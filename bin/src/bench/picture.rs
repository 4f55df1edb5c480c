//! A report as a picture (SVG): a panel for each rate, in it a bar for each side from zero to the median, with a
//! whisker from the least to the most.

use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;

use super::report::{Report, Summary, figure, ratio};
use crate::error::{CliError, Context as _};

const PANEL_WIDTH: f64 = 190.0;
const PANEL_HEIGHT: f64 = 250.0;
/// Above the panels: title, directories.
const HEAD: f64 = 92.0;
/// Below them: machine, notes.
const FOOT_LINE: f64 = 16.0;
const MARGIN: f64 = 20.0;
/// Of the highest bar.
const BAR_HEIGHT: f64 = 150.0;
const BAR_WIDTH: f64 = 46.0;
/// So that a picture of one panel has room for its title.
const LEAST_WIDTH: f64 = 640.0;

const TARGET: &str = "#2b6cb0";
const BASELINE: &str = "#a0aec0";

/// Refuses a path at which there is something: it is seen before anything is measured.
///
/// # Errors
/// When there is.
pub fn check(path: &Path) -> Result<(), CliError> {
    if path.symlink_metadata().is_ok() {
        let text = format!("{} is there already: name another file for the picture, or remove it", path.display());
        return Err(CliError::Usage(text));
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if folder.is_dir() {
        return Ok(());
    }
    Err(CliError::NotFound(format!("the picture cannot be written: there is no directory {}", folder.display())))
}

/// Writes a picture into a new file.
///
/// # Errors
/// When the file is there already, or cannot be written.
pub fn write(report: &Report, path: &Path) -> Result<(), CliError> {
    let file = OpenOptions::new().write(true).create_new(true).open(path);
    let mut file = file.context(format_args!("cannot make {}", path.display()))?;
    file.write_all(picture(report).as_bytes()).context(format_args!("cannot write {}", path.display()))
}

/// Text as it may stand in an element or an attribute of XML, which has no way to say some characters.
fn escaped(text: &str) -> String {
    let text = text.replace(|c: char| c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}'), "\u{fffd}");
    [("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("\"", "&quot;"), ("'", "&apos;")]
        .into_iter()
        .fold(text, |text, (character, entity)| text.replace(character, entity))
}

/// An SVG document that grows.
struct Svg(String);

impl Svg {
    fn text(&mut self, x: f64, y: f64, style: &str, text: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.0, r#"<text x="{x:.1}" y="{y:.1}" {style}>{}</text>"#, escaped(text));
    }

    fn bar(&mut self, x: f64, y: f64, width: f64, height: f64, colour: &str) {
        let _ = writeln!(
            self.0,
            r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" fill="{colour}"/>"#
        );
    }

    fn line(&mut self, from: (f64, f64), to: (f64, f64)) {
        let _ = writeln!(
            self.0,
            r##"<line x1="{:.1}" y1="{:.1}" x2="{:.1}" y2="{:.1}" stroke="#1a202c" stroke-width="1.5"/>"##,
            from.0, from.1, to.0, to.1
        );
    }

    fn panel(&mut self, rate: &Summary, left: f64) {
        let middle = left + PANEL_WIDTH / 2.0;
        let floor = HEAD + 46.0 + BAR_HEIGHT;
        self.text(middle, HEAD + 14.0, r#"font-size="13" font-weight="bold" text-anchor="middle""#, rate.operation);
        let unit = match rate.ratio {
            Some(of_baseline) => format!("{}, {} of baseline", rate.unit, ratio(of_baseline)),
            None => rate.unit.to_owned(),
        };
        self.text(middle, HEAD + 30.0, r##"font-size="11" fill="#4a5568" text-anchor="middle""##, &unit);
        let most = rate.baseline.map_or(rate.target.max, |baseline| baseline.max.max(rate.target.max));
        // What is nothing everywhere has no height.
        let scale = if most > 0.0 { BAR_HEIGHT / most } else { 0.0 };
        let mut sides = vec![(rate.target, TARGET)];
        sides.extend(rate.baseline.map(|baseline| (baseline, BASELINE)));
        let step = PANEL_WIDTH / (sides.len() + 1) as f64;
        for (number, (spread, colour)) in sides.into_iter().enumerate() {
            let centre = left + step * (number + 1) as f64;
            let height = |figure: f64| floor - figure * scale;
            self.bar(centre - BAR_WIDTH / 2.0, height(spread.median), BAR_WIDTH, spread.median * scale, colour);
            self.line((centre, height(spread.min)), (centre, height(spread.max)));
            for end in [spread.min, spread.max] {
                self.line((centre - 6.0, height(end)), (centre + 6.0, height(end)));
            }
            let median = figure(spread.median);
            self.text(centre, floor + 16.0, r#"font-size="12" text-anchor="middle""#, &median);
        }
        self.line((left + 12.0, floor), (left + PANEL_WIDTH - 12.0, floor));
    }
}

fn picture(report: &Report) -> String {
    let width = (report.summary.len() as f64 * PANEL_WIDTH + 2.0 * MARGIN).max(LEAST_WIDTH);
    let foot = HEAD + PANEL_HEIGHT;
    let mut notes = vec![report.heading.work.clone(), report.machine.summary()];
    notes.extend(report.heading.notes.iter().cloned());
    notes.push("Bars are medians of the rounds, whiskers the least and the most.".to_owned());
    let height = foot + notes.len() as f64 * FOOT_LINE + MARGIN;
    let mut svg = Svg(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
         viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"sans-serif\" fill=\"#1a202c\">\n"
    ));
    svg.bar(0.0, 0.0, width, height, "#ffffff");
    let title = format!("cv bench {}", report.heading.workload);
    svg.text(MARGIN, 30.0, r#"font-size="18" font-weight="bold""#, &title);
    let mut sides = vec![(&report.target, "target", TARGET)];
    sides.extend(report.baseline.as_ref().map(|place| (place, "baseline", BASELINE)));
    for (number, (place, name, colour)) in sides.into_iter().enumerate() {
        let y = 52.0 + 20.0 * number as f64;
        svg.bar(MARGIN, y - 10.0, 12.0, 12.0, colour);
        svg.text(MARGIN + 18.0, y, r#"font-size="12""#, &format!("{name}: {}", place.summary()));
    }
    for (number, rate) in report.summary.iter().enumerate() {
        svg.panel(rate, MARGIN + number as f64 * PANEL_WIDTH);
    }
    for (number, note) in notes.iter().enumerate() {
        let y = foot + FOOT_LINE * number as f64 + 12.0;
        svg.text(MARGIN, y, r##"font-size="11" fill="#4a5568""##, note);
    }
    svg.0.push_str("</svg>\n");
    svg.0
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::{report, round};
    use super::super::rounds::Side;
    use super::*;

    /// Checks that every element is closed in its order and every attribute quoted; answers the names of the elements.
    fn elements(document: &str) -> Vec<String> {
        let (mut open, mut all) = (vec![], vec![]);
        let mut rest = document;
        while let Some(begin) = rest.find('<') {
            assert!(!rest[..begin].contains('>'), "{rest}");
            let end = begin + rest[begin..].find('>').unwrap();
            let tag = &rest[begin + 1..end];
            let text = &rest[..begin];
            for piece in text.split('&').skip(1) {
                assert!(["amp;", "lt;", "gt;", "quot;", "apos;"].iter().any(|name| piece.starts_with(name)), "{text}");
            }
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name));
            } else {
                assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
                let name = tag.split([' ', '/']).next().unwrap().to_owned();
                all.push(name.clone());
                if !tag.ends_with('/') {
                    open.push(name);
                }
            }
            rest = &rest[end + 1..];
        }
        assert!(open.is_empty() && rest.trim().is_empty(), "{open:?} {rest}");
        all
    }

    #[test]
    fn it_is_well_formed_whatever_the_directory_is_called() {
        let mut report =
            report(&[round(0, Side::Target, 10), round(1, Side::Target, 30), round(0, Side::Baseline, 40)]);
        report.target.path = "/a<b>&\"c'\u{1}\u{ffff}".to_owned();
        let document = picture(&report);
        let names = elements(&document);
        let count = |name: &str| names.iter().filter(|element| *element == name).count();
        // The ground, two for the directories, two for each of two rates; whiskers have three lines.
        assert_eq!((count("svg"), count("rect"), count("line")), (1, 1 + 2 + 4, 2 * (2 * 3 + 1)));
        assert!(document.contains("/a&lt;b&gt;&amp;&quot;c&apos;\u{fffd}\u{fffd} (proc)"), "{document}");
        assert!(document.contains("files/s, 0.50 of baseline") && !document.contains("NaN"), "{document}");
    }

    #[test]
    fn without_a_baseline_or_any_success_it_is_a_picture_still() {
        let document = picture(&report(&[round(0, Side::Target, 0)]));
        assert!(elements(&document).len() > 10 && !document.contains("NaN") && !document.contains("inf"), "{document}");
        elements(&picture(&report(&[])));
    }

    #[test]
    fn nothing_is_written_over() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("bench.svg");
        check(&path).unwrap();
        let report = report(&[round(0, Side::Target, 1)]);
        write(&report, &path).unwrap();
        assert!(check(&path).unwrap_err().to_string().contains("is there already"));
        assert!(write(&report, &path).is_err());
        assert!(matches!(check(&directory.path().join("none/a.svg")), Err(CliError::NotFound(_))));
        assert!(std::fs::read_to_string(&path).unwrap().ends_with("</svg>\n"));
    }
}
