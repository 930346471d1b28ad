//! `spile report --live`: a page of one running server.
//!
//! The page asks this process for its figures, and this process asks the server for what it has counted, at most once in [`REST`]. When
//! nobody looks, nothing is asked. Only this host can connect, and only under a name of this host: a page from
//! elsewhere whose name is made to lead here (DNS rebinding) is refused by its `Host`.

use std::collections::{BTreeMap, VecDeque};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use spile_core::metrics::{OpReading, bounds_of};
use spile_core::{Error, Result};
use spile_server::serving::api::client::{LOOK_PATIENCE, ask, escape as in_path};
use spile_server::serving::api::rates::{Interval, LayerRates};
use spile_server::serving::api::stats::{DiskStats, LayerKind};
use spile_server::serving::api::types::DiskList;
use spile_server::units::format_us;

use super::page;
use crate::experiments::plot::{Axis, Figure, Heat, Marks, Panel, Point, Series, escape, styles};

/// The shortest time between two looks at the server.
const REST: Duration = Duration::from_millis(900);
/// Intervals that are shown.
const KEPT: usize = 60;
/// Columns of the heat map: the last of these intervals.
const COLUMNS: usize = 20;
/// What may be in the page: nothing from elsewhere.
const POLICY: &str =
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'";

/// Asks for the figures every second while the page is seen, and keeps what the reader has opened and where the focus is.
const SCRIPT: &str = "<script>
const main = document.getElementById('main'), state = document.getElementById('state');
async function look() {
  if (document.hidden) return;
  try {
    const answer = await fetch('/figures');
    const html = await answer.text();
    const open = [...main.querySelectorAll('figure:has(details[open])')].map(one => one.id);
    const focus = document.activeElement && document.activeElement.id;
    main.innerHTML = html;
    open.forEach(id => document.querySelector('#' + CSS.escape(id) + ' details')?.setAttribute('open', ''));
    if (focus) document.getElementById(focus)?.focus({preventScroll: true});
    state.textContent = '';
  } catch {
    state.textContent = 'spile report has ended: the figures stand still.';
  }
}
look();
setInterval(look, 1000);
</script>
";

/// What one disk did in an interval.
struct Moment {
    at: Instant,
    /// All layers of a kind as one, the guest's side first.
    layers: Vec<(LayerKind, LayerRates)>,
    /// Requests at the front by the power of two of their latency in µs, from 1 µs on.
    latencies: [u64; 24],
}

/// One disk.
#[derive(Default)]
struct Watched {
    last: Option<DiskStats>,
    moments: VecDeque<Moment>,
}

struct Watch {
    socket: PathBuf,
    asked: Option<Instant>,
    disks: BTreeMap<String, Watched>,
    trouble: Option<String>,
}

/// A page that is served.
pub struct Live {
    listener: TcpListener,
    watch: Watch,
    port: u16,
}

impl Live {
    /// Listens on this host for the page of the server with the control socket `socket`; port 0 takes any that is free.
    ///
    /// # Errors
    /// When the server does not answer, or the port is taken.
    pub fn new(socket: &Path, port: u16) -> Result<Self> {
        let mut watch = Watch { socket: socket.to_owned(), asked: None, disks: BTreeMap::new(), trouble: None };
        watch.ask()?;
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(|e| Error::io("listen on 127.0.0.1", e))?;
        let port = listener.local_addr().map_err(|e| Error::io("listen on 127.0.0.1", e))?.port();
        Ok(Self { listener, watch, port })
    }

    /// Where the page is.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/", self.port)
    }

    /// Answers until the process ends.
    ///
    /// # Errors
    /// When the runtime cannot be started.
    pub fn run(self) -> Result<()> {
        let failed = |source| Error::io("serve the page", source);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        self.listener.set_nonblocking(true).map_err(failed)?;
        let router = router(Arc::new(Mutex::new(self.watch)), self.port);
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(self.listener).map_err(failed)?;
            axum::serve(listener, router).await.map_err(failed)
        })
    }
}

type Shared = Arc<Mutex<Watch>>;

fn router(watch: Shared, port: u16) -> Router {
    let figures = async |State(watch): State<Shared>| {
        // A call waits for the server: not on the thread that answers others.
        let html = tokio::task::spawn_blocking(move || watch.lock().unwrap_or_else(PoisonError::into_inner).look());
        html.await.map(Html).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
    };
    let page = async |State(watch): State<Shared>| {
        let socket = watch.lock().unwrap_or_else(PoisonError::into_inner).socket.display().to_string();
        let title = format!("Spile: {socket}");
        let header = format!("<h1>{}</h1><p id=\"state\" role=\"status\" class=\"muted\"></p>", escape(&title));
        Html(page::document(&title, &header, "<p>The first interval takes a second.</p>", SCRIPT))
    };
    Router::new()
        .route("/", get(page))
        .route("/figures", get(figures))
        .layer(from_fn_with_state(port, only_this_host))
        .with_state(watch)
}

/// Refuses a request that names another host, and has answers used by nobody else.
async fn only_this_host(State(port): State<u16>, request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let mut answer = match is_this_host(host, port) {
        true => next.run(request).await,
        false => (StatusCode::FORBIDDEN, "this page is read under 127.0.0.1 or localhost\n").into_response(),
    };
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, header::HeaderValue::from_static(POLICY));
    headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    answer
}

fn is_this_host(host: &str, port: u16) -> bool {
    ["127.0.0.1", "localhost"].iter().any(|name| host == format!("{name}:{port}"))
}

impl Watch {
    /// The figures, after a look at the server if the last one is not just now.
    fn look(&mut self) -> String {
        if self.asked.is_none_or(|asked| asked.elapsed() >= REST) {
            self.trouble = self.ask().err().map(|error| error.to_string());
        }
        self.html()
    }

    fn ask(&mut self) -> Result<()> {
        self.asked = Some(Instant::now());
        let list: DiskList = ask(&self.socket, "GET", "/v1/disks", LOOK_PATIENCE)?;
        self.disks.retain(|name, _| list.disks.iter().any(|disk| disk.name == *name));
        for disk in &list.disks {
            let path = format!("/v1/disks/{}/stats", in_path(&disk.name));
            self.disks.entry(disk.name.clone()).or_default().add(ask(&self.socket, "GET", &path, LOOK_PATIENCE)?);
        }
        Ok(())
    }

    fn html(&self) -> String {
        let trouble: String = self.trouble.iter().map(|why| format!("<p class=\"mark\">{}</p>", escape(why))).collect();
        let disk = |(number, (name, watched)): (usize, (&String, &Watched))| {
            let figures = watched.figures();
            let figures =
                figures.iter().map(|(what, one)| page::figure(what, one, &format!("d{number}-{what}"), KEPT * 8));
            format!("<section><h2>{}</h2>{}</section>", escape(name), figures.collect::<String>())
        };
        let none = if self.disks.is_empty() { "<p>The server has no disks.</p>" } else { "" };
        format!("{trouble}{none}{}", self.disks.iter().enumerate().map(disk).collect::<String>())
    }
}

impl Watched {
    fn add(&mut self, now: DiskStats) {
        let interval = self.last.as_ref().and_then(|last| Interval::between(last, &now).ok());
        // A successor's counts begin at zero; its first interval is the next one.
        self.last = Some(now);
        let Some(interval) = interval else { return };
        let kinds = [LayerKind::Front, LayerKind::Disk, LayerKind::Image, LayerKind::Store];
        let layers = kinds.into_iter().filter_map(|kind| Some((kind, interval.all_of(kind)?.rates()))).collect();
        let front = interval.all_of(LayerKind::Front).map(|front| front.reading.total());
        let latencies = front.map_or([0; 24], |total| by_power(&total));
        self.moments.push_back(Moment { at: Instant::now(), layers, latencies });
        while self.moments.len() > KEPT {
            self.moments.pop_front();
        }
    }

    /// Four figures: what is moved, how many wait where, how long it takes, and how that is spread.
    fn figures(&self) -> Vec<(&'static str, Figure)> {
        let of_disk = |value: fn(&LayerRates) -> Option<f64>| self.line(LayerKind::Disk, value);
        let moved = vec![
            self.panel(
                "requests per second",
                &[("read", of_disk(|disk| Some(disk.reads_per_s))), ("write", of_disk(|disk| Some(disk.writes_per_s)))],
            ),
            self.panel(
                "MB/s (10^6 bytes)",
                &[
                    ("read", of_disk(|disk| Some(disk.read_bytes_per_s / 1e6))),
                    ("write", of_disk(|disk| Some(disk.write_bytes_per_s / 1e6))),
                ],
            ),
        ];
        let kinds = [LayerKind::Front, LayerKind::Disk, LayerKind::Image, LayerKind::Store];
        let queues: Vec<_> =
            kinds.iter().map(|kind| (kind.name(), self.line(*kind, |layer| layer.queue_size_avg))).collect();
        let of_front = |value: fn(&LayerRates) -> Option<f64>| self.line(LayerKind::Front, value);
        let latency =
            [("p50", of_front(|front| front.latency_p50_us)), ("p99", of_front(|front| front.latency_p99_us))];
        let waits = vec![
            self.panel("average queue size", &queues),
            self.panel("latency at the front in µs, as the guest sees it", &latency),
        ];
        vec![
            ("moved", figure("What the guest moves", moved)),
            ("waits", figure("How many requests wait at each layer, and how long they take", waits)),
            ("latencies", figure("How latencies are spread", vec![self.heat()])),
        ]
    }

    /// A value of one layer, by seconds before now.
    fn line(&self, kind: LayerKind, value: impl Fn(&LayerRates) -> Option<f64>) -> Vec<Point> {
        let now = self.moments.back().map(|last| last.at);
        let point = |moment: &Moment| {
            let layer = moment.layers.iter().find(|(other, _)| *other == kind)?;
            let ago = now?.duration_since(moment.at).as_secs_f64();
            Some(Point::new(-ago, value(&layer.1)?))
        };
        self.moments.iter().filter_map(point).collect()
    }

    fn panel(&self, unit: &str, lines: &[(&str, Vec<Point>)]) -> Panel {
        let most = lines.iter().flat_map(|(_, points)| points).map(|point| point.y).fold(0.0, f64::max);
        let looks = styles(lines.iter().map(|(name, _)| *name));
        let series = lines.iter().zip(looks).map(|((name, points), style)| Series {
            name: (*name).to_owned(),
            style,
            points: points.clone(),
        });
        let x = Axis::between("seconds before now", -(KEPT as f64), 0.0);
        let marks = Marks::Series { x, y: Axis::linear(unit, most), series: series.collect(), reference: None };
        Panel { title: String::new(), marks }
    }

    /// Requests of each interval by their latency.
    fn heat(&self) -> Panel {
        let shown: Vec<&Moment> = self.moments.iter().rev().take(COLUMNS).rev().collect();
        let rows = || 0..24;
        let came = |row: usize| shown.iter().any(|moment| moment.latencies[row] > 0);
        let (low, high) = (rows().find(|row| came(*row)).unwrap_or(0), rows().rfind(|row| came(*row)).unwrap_or(0));
        let value = |row: usize, moment: &&Moment| (moment.latencies[row] > 0).then_some(moment.latencies[row] as f64);
        let heat = Heat {
            x: "intervals before now".to_owned(),
            columns: (0..shown.len()).rev().map(|ago| ago.to_string()).collect(),
            y: "latency at the front, from".to_owned(),
            rows: (low..=high).map(|row| format_us((1u64 << row) as f64)).collect(),
            value: "requests".to_owned(),
            values: (low..=high).map(|row| shown.iter().map(|moment| value(row, moment)).collect()).collect(),
        };
        Panel { title: String::new(), marks: Marks::Heat(heat) }
    }
}

fn figure(title: &str, panels: Vec<Panel>) -> Figure {
    let note = "each point is an interval of about a second".to_owned();
    Figure { title: title.to_owned(), note, panels, columns: 2, ..Figure::default() }
}

fn by_power(total: &OpReading) -> [u64; 24] {
    let mut powers = [0; 24];
    for (bucket, count) in total.latency.counts.iter().enumerate() {
        let us = (bounds_of(bucket).start / 1000).max(1);
        powers[(us.ilog2() as usize).min(23)] += count;
    }
    powers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_host_are_answered() {
        assert!(is_this_host("127.0.0.1:80", 80) && is_this_host("localhost:80", 80));
        for other in ["", "127.0.0.1", "127.0.0.1:81", "evil.example:80", "127.0.0.1.evil.example:80", "localhost:80.x"]
        {
            assert!(!is_this_host(other, 80), "{other}");
        }
    }

    #[test]
    fn latencies_are_counted_by_their_power_of_two() {
        let mut total = OpReading::default();
        total.latency.counts = vec![0; spile_core::metrics::BUCKETS];
        for us in [0, 1, 3, 1000] {
            total.latency.counts[spile_core::metrics::bucket_of(us * 1000)] += 1;
        }
        let powers = by_power(&total);
        assert_eq!((powers[0], powers[1], powers[9], powers.iter().sum::<u64>()), (2, 1, 1, 4));
    }

    #[test]
    fn figures_of_an_empty_disk_are_well() {
        for (name, figure) in Watched::default().figures() {
            assert_eq!(figure.faults(), Vec::<String>::new(), "{name}");
        }
    }
}
