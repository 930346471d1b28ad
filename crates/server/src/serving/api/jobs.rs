//! The paths of jobs: a server answers them, and a command that works on a disk that no server has ([`OwnJobs`](crate::serving::offline::OwnJobs)).

use std::pin::Pin;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{FromRef, Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::get;
use spile_core::Result;

use super::routes::{Answer, Context, json, read, unknown, wrong_method};
use super::types::{Failure, Job, JobChange, JobList};

/// Who has jobs.
pub trait HasJobs: Send + Sync {
    /// All of them.
    ///
    /// # Errors
    /// `Shutdown` when whoever has them ends.
    fn jobs(&self) -> Result<Vec<Job>>;

    /// The job of this name.
    ///
    /// # Errors
    /// `NotFound`; as [`HasJobs::jobs`].
    fn job(&self, id: &str) -> Result<Job>;

    /// Does what `change` says with the job of this name.
    ///
    /// # Errors
    /// As [`HasJobs::job`]; `InvalidInput` for a state that nobody can ask for.
    fn change<'a>(
        &'a self,
        id: &'a str,
        change: &'a JobChange,
    ) -> Pin<Box<dyn Future<Output = Result<()>> + Send + 'a>>;
}

/// What the handlers need.
#[derive(Clone)]
pub struct Jobs(Arc<dyn HasJobs>);

impl FromRef<Context> for Jobs {
    fn from_ref(context: &Context) -> Self {
        Self(Arc::new(context.clone()))
    }
}

impl HasJobs for Context {
    fn jobs(&self) -> Result<Vec<Job>> {
        self.view.jobs(&self.server)
    }

    fn job(&self, id: &str) -> Result<Job> {
        self.view.job(&self.server, id)
    }

    fn change<'a>(
        &'a self,
        id: &'a str,
        change: &'a JobChange,
    ) -> Pin<Box<dyn Future<Output = Result<()>> + Send + 'a>> {
        Box::pin(async move {
            match change.state.as_deref() {
                Some("handed_over") => self.view.hand_over(id).await,
                _ => self.view.change_job(id, change),
            }
        })
    }
}

/// The paths of whoever has jobs and nothing else.
pub fn router(jobs: Arc<dyn HasJobs>) -> Router {
    Router::new()
        .route("/v1/jobs", get(list))
        .route("/v1/jobs/{id}", get(show).patch(change))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .with_state(Jobs(jobs))
}

/// The jobs on the disks' images: of each disk the one that is under way, and the last ones that have ended.
#[utoipa::path(get, operation_id = "jobs", path = "/v1/jobs",
    responses((status = 200, description = "what was asked for", body = JobList), (status = "default", description = "why it has failed", body = Failure)))]
pub(super) async fn list(State(Jobs(jobs)): State<Jobs>) -> Answer {
    Ok(json(StatusCode::OK, &JobList { jobs: jobs.jobs()? }))
}

/// One job.
#[utoipa::path(get, operation_id = "job", path = "/v1/jobs/{id}", params(("id" = String, Path, description = "the job's name")),
    responses((status = 200, description = "what was asked for", body = Job), (status = "default", description = "why it has failed", body = Failure)))]
pub(super) async fn show(State(Jobs(jobs)): State<Jobs>, Path(id): Path<String>) -> Answer {
    shown(&*jobs, &id)
}

/// Pauses a job, has it go on, cancels it, or changes its rate. What it has done stays done. `handed_over` is answered when that is so.
#[utoipa::path(patch, operation_id = "change_job", path = "/v1/jobs/{id}",
    params(("id" = String, Path, description = "the job's name")), request_body = JobChange,
    responses((status = 200, description = "what was asked for", body = Job), (status = "default", description = "why it has failed", body = Failure)))]
pub(super) async fn change(State(Jobs(jobs)): State<Jobs>, Path(id): Path<String>, body: Body) -> Answer {
    jobs.change(&id, &read(body).await?).await?;
    shown(&*jobs, &id)
}

fn shown(jobs: &dyn HasJobs, id: &str) -> std::result::Result<Response, super::routes::Refusal> {
    Ok(json(StatusCode::OK, &jobs.job(id)?))
}
