//! The page itself.

use crate::experiments::HostFacts;
use crate::experiments::about::{About, about};
use crate::experiments::plot::{Figure, escape, sheet};

use super::drawn::Section;
use super::results::{Known, NotUnderstood};
use super::tables;

/// Colours are those of the figures.
const STYLE: &str = "
:root{color-scheme:light dark;--ground:#fff;--text:#1a1a1a;--muted:#555;--line:#d4d8dd;--soft:#f4f6f8;--link:#0059a0;--warn:#a33c00}
@media (prefers-color-scheme:dark){:root{--ground:#12161c;--text:#e8e8e8;--muted:#b0b6be;--line:#39414b;--soft:#1b2129;--link:#7cc0f5;--warn:#ffb26b}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--text);font:16px/1.5 system-ui,-apple-system,\"Segoe UI\",Roboto,\"DejaVu Sans\",Arial,sans-serif}
header,main,footer{max-width:1240px;margin:0 auto;padding:0 12px}
h1{font-size:1.6rem;line-height:1.2;margin:1rem 0 .3rem}h2{font-size:1.3rem;margin:2.2rem 0 .3rem}h3{font-size:1rem;margin:.2rem 0}h1,h2,h3,li{overflow-wrap:anywhere}
a{color:var(--link)}
p{max-width:46rem;margin:.4rem 0}
.muted{color:var(--muted)}
.skip{position:absolute;left:-999px}.skip:focus{position:static}
nav ul{display:flex;flex-wrap:wrap;gap:.3rem 1rem;padding:0;list-style:none}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem;margin:.4rem 0}
dt{color:var(--muted)}dd{margin:0;overflow-wrap:anywhere}
.beside{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));gap:.8rem;margin:.6rem 0}
.beside>div{border:1px solid var(--line);background:var(--soft);padding:.6rem .8rem;border-radius:4px}
.beside ul{margin:.2rem 0;padding-left:1.1rem}
figure{overflow-wrap:anywhere;margin:1rem 0;border-top:1px solid var(--line);padding-top:.6rem}
.mark{display:inline-block;border:1px solid var(--warn);color:var(--warn);padding:0 .4rem;font-size:.85rem}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,360px),1fr));gap:14px;margin:.6rem 0;align-items:end}
.panels .keys{grid-column:1/-1}.panels:has(.keys){align-items:start}
.panels svg{max-width:100%;height:auto;display:block}
summary{cursor:pointer;color:var(--link)}
:focus-visible{outline:3px solid var(--link);outline-offset:2px}
.scroll{overflow-x:auto;max-height:30rem}
table{border-collapse:collapse;font-size:.85rem}caption{text-align:left;color:var(--muted)}
th,td{text-align:left;padding:.15rem .6rem .15rem 0;border-bottom:1px solid var(--line);white-space:nowrap}
td.n{text-align:right;font-variant-numeric:tabular-nums}
code{overflow-wrap:anywhere}
@media (max-width:30rem){dl{display:block}dd{margin-bottom:.3rem}}
";

/// The page of all sections; tables have at most so many rows.
pub fn html(sections: &[Section], not_understood: &[NotUnderstood], max_rows: usize) -> String {
    let ids: Vec<String> = (0..sections.len()).map(|number| id(sections, number)).collect();
    let links: String = sections.iter().zip(&ids).map(|(section, id)| link(id, &title(section, sections))).collect();
    let last = if not_understood.is_empty() { String::new() } else { link("not-understood", "Not understood") };
    let body: String =
        sections.iter().zip(&ids).map(|(one, id)| section(one, id, &title(one, sections), max_rows)).collect();
    let main = format!("{}{body}{}", machines(sections), other_files(not_understood));
    let nav = format!(
        "<nav aria-label=\"Parts of this page\"><ul>{}{links}{last}</ul></nav>",
        link("machine", "The machine")
    );
    let lead = "<p>What was measured, drawn, with the values behind each figure. Lines and bars are medians; bands and whiskers go from \
                the value that a tenth of what was measured is below to that which nine tenths are below.</p>";
    document("Spile: measurements", &format!("<h1>Spile: measurements</h1>{lead}{nav}"), &main, "")
}

/// A whole document with the style of reports.
pub fn document(title: &str, header: &str, main: &str, script: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n\
         <link rel=\"icon\" href=\"data:,\">\n<title>{}</title>\n<style>{STYLE}{}</style>\n</head>\n<body>\n\
         <a class=\"skip\" href=\"#main\">To the figures</a>\n<header>{header}</header>\n<main id=\"main\">\n{main}</main>\n\
         <footer><p class=\"muted\">Made by spile {}.</p></footer>\n{script}</body>\n</html>\n",
        escape(title),
        sheet(),
        env!("CARGO_PKG_VERSION")
    )
}

fn link(id: &str, text: &str) -> String {
    format!("<li><a href=\"#{id}\">{}</a></li>", escape(text))
}

/// A name that no other section has.
fn id(sections: &[Section], number: usize) -> String {
    let name: String =
        sections[number].known.experiment.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
    let before = sections[..number].iter().filter(|other| other.known.experiment == sections[number].known.experiment);
    match before.count() {
        0 => format!("x-{name}"),
        count => format!("x-{name}-{}", count + 1),
    }
}

/// The experiment, and the file where several files are of one experiment.
fn title(section: &Section, sections: &[Section]) -> String {
    let same = sections.iter().filter(|other| other.known.experiment == section.known.experiment).count();
    match same {
        1 => section.known.experiment.clone(),
        _ => format!("{} ({})", section.known.experiment, section.known.path.display()),
    }
}

/// Each machine once, with the results that come from it, and where they were measured.
fn machines(sections: &[Section]) -> String {
    let mut machines: Vec<(HostFacts, Vec<&Known>)> = Vec::new();
    for section in sections {
        let known = section.known;
        let host = HostFacts { date_utc: String::new(), file_system: None, device: None, ..known.host.clone() };
        add_to(&mut machines, host, known);
    }
    let heading = if machines.len() > 1 { "The machines" } else { "The machine" };
    let one = |(host, results): &(HostFacts, Vec<&Known>)| {
        let mut storages: Vec<(String, Vec<&Known>)> = Vec::new();
        results.iter().for_each(|known| add_to(&mut storages, known.host.storage(), known));
        let storages = storages.iter().map(|(storage, results)| {
            let names: Vec<&str> = results.iter().map(|known| known.experiment.as_str()).collect();
            ("measured on", format!("{storage} ({})", names.join(", ")))
        });
        let dates: Vec<String> =
            results.iter().map(|known| format!("{}, {}", known.experiment, known.host.date_utc)).collect();
        let facts = host.facts().into_iter().chain(storages).chain([("measured at", dates.join(" · "))]);
        let facts: String = facts.map(|(name, value)| format!("<dt>{name}</dt><dd>{}</dd>", escape(&value))).collect();
        format!("<dl>{facts}</dl>\n")
    };
    let all: String = machines.iter().map(one).collect();
    format!("<section id=\"machine\"><h2>{heading}</h2>\n{all}</section>\n")
}

/// Puts a result into the group that has this name.
fn add_to<'a, T: PartialEq>(groups: &mut Vec<(T, Vec<&'a Known>)>, name: T, known: &'a Known) {
    match groups.iter_mut().find(|(other, _)| *other == name) {
        Some((_, results)) => results.push(known),
        None => groups.push((name, vec![known])),
    }
}

fn section(section: &Section, id: &str, title: &str, max_rows: usize) -> String {
    let about = about(&section.known.experiment);
    let sentence = about.map_or(String::new(), |about| format!("<p>{}</p>", escape(about.sentence)));
    let figures = section.figures.iter().map(|(name, one)| figure(name, one, &format!("{id}-{name}"), max_rows));
    let figures: String = figures.collect();
    let why = section.why_none.iter().map(|why| format!("<p class=\"mark\">{}</p>", escape(why)));
    let why: String = why.collect();
    let empty = Vec::new();
    let rows = section.known.json["rows"].as_array().unwrap_or(&empty);
    let parameters: String = tables::of_rows(std::slice::from_ref(&section.known.json["parameters"]), 1);
    format!(
        "<section id=\"{id}\"><h2>{}</h2>\n{sentence}\n{}{why}{figures}\n\
         <details><summary>All {} rows of {}</summary>{}</details>\n\
         <details><summary>What was asked for</summary>{parameters}</details></section>\n",
        escape(title),
        beside(about, &section.found),
        rows.len(),
        escape(&section.known.experiment),
        tables::of_rows(rows, max_rows),
    )
}

/// What the article found beside what was found here.
fn beside(about: Option<&About>, found: &[String]) -> String {
    let article = about.filter(|about| !about.article.is_empty()).map(|about| {
        let (article, found) = (escape(about.article), escape(about.found));
        format!("<div><h3>What the article found</h3><p>{found}</p><p class=\"muted\">{article}</p></div>")
    });
    let items: String = found.iter().map(|sentence| format!("<li>{}</li>", escape(sentence))).collect();
    let here = match (found.is_empty(), &article) {
        (true, None) => None,
        (true, Some(_)) => Some("<p>The figures and the rows below.</p>".to_owned()),
        (false, _) => Some(format!("<ul>{items}</ul>")),
    };
    let here = here.map(|here| format!("<div><h3>What was found here</h3>{here}</div>"));
    let parts: String = article.into_iter().chain(here).collect();
    if parts.is_empty() { parts } else { format!("<div class=\"beside\">{parts}</div>\n") }
}

/// One figure, with its values behind it.
pub fn figure(name: &str, figure: &Figure, id: &str, max_rows: usize) -> String {
    let mark: String = figure.mark.iter().map(|mark| format!("<p class=\"mark\">{}</p>", escape(mark))).collect();
    // On a wide screen as many panels beside each other as in the file: those of a row belong together. Three are one row.
    let columns = if figure.panels.len() == 3 { 3 } else { figure.columns.max(1) };
    let width = 386 * columns;
    let class = |number: usize| if number == 0 && !figure.keys.is_empty() { " class=\"keys\"" } else { "" };
    let elements = figure.to_elements(id).into_iter().enumerate();
    let panels: String = elements.map(|(number, svg)| format!("<div{}>{svg}</div>", class(number))).collect();
    format!(
        "<figure id=\"{id}\" tabindex=\"0\" aria-labelledby=\"{id}-caption\" data-figure=\"{}\">\n\
         <figcaption id=\"{id}-caption\"><h3>{}</h3>{mark}<p class=\"muted\">{}</p></figcaption>\n<div class=\"panels\" style=\"max-width:{width}px\">{panels}</div>\n\
         <details><summary>The values of this figure</summary>{}</details>\n</figure>\n",
        escape(name),
        escape(&figure.title),
        escape(&figure.note),
        tables::of_figure(figure, max_rows),
    )
}

fn other_files(files: &[NotUnderstood]) -> String {
    if files.is_empty() {
        return String::new();
    }
    let item = |file: &NotUnderstood| {
        format!("<li><code>{}</code>: {}</li>\n", escape(&file.path.display().to_string()), escape(&file.why))
    };
    let items: String = files.iter().map(item).collect();
    format!("<section id=\"not-understood\"><h2>Not understood</h2>\n<ul>{items}</ul></section>\n")
}
