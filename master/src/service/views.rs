//! The `Views` service.

use std::time::Duration;

use cavern_proto::master::views_server::Views;
use cavern_proto::master::{
    CreateViewRequest, DeleteViewRequest, GetViewRequest, ImportViewRequest, ListViewsRequest, LocateBlocksReply,
    LocateBlocksRequest, View, ViewList, ViewProgress, ViewStep,
};
use cavern_work::WorkError;
use cavern_work::namespace::Lookups;
use cavern_work::views::unknown;
use futures::StreamExt;
use tonic::{Request, Response, Status, Streaming};

use super::call::{Answer, Answers, OrStatus as _, check_count};
use super::guard::{AuditedCall, is_about};
use crate::services::Services;

/// Files of one `LocateBlocks`, beside the one that is asked for.
const PREFETCH_MAX: usize = 256;
/// How long the first message of an import may take.
const FIRST_MESSAGE: Duration = Duration::from_secs(10);

impl Services {
    /// A view that is there for whoever asks.
    async fn view(&self, lookups: &Lookups, wanted: &GetViewRequest) -> Result<View, WorkError> {
        let view = self.views.find(wanted).await?;
        if lookups.enters_view(&view) { Ok(view) } else { Err(unknown(wanted)) }
    }
}

#[tonic::async_trait]
impl Views for Services {
    type CreateViewStream = Answers<ViewProgress>;

    async fn create_view(&self, request: Request<CreateViewRequest>) -> Answer<Self::CreateViewStream> {
        is_about(&request, |asked| format!("{} of {}", asked.name, asked.path));
        let (views, request) = (self.views.clone(), request.into_inner());
        Ok(Response::new(self.answer_in_parts(move |answers| async move {
            let view = views.create(request, &answers).await?;
            let (step, names, bytes) = (ViewStep::Done.into(), view.names, view.object_bytes);
            Ok(Some(ViewProgress { step, names, bytes, view: Some(view) }))
        })))
    }

    async fn import_view(&self, request: Request<Streaming<ImportViewRequest>>) -> Answer<View> {
        let audited = AuditedCall::of(&request);
        let mut messages = request.into_inner();
        let first = tokio::time::timeout(FIRST_MESSAGE, messages.next()).await.ok().flatten();
        let unnamed = || WorkError::Invalid("the first message of an import says what the view is to be called".into());
        let first = first.ok_or_else(unnamed).or_status()??;
        if let Some(audited) = audited {
            audited.is_about(|| first.name.clone());
        }
        let broken = |status: Status| WorkError::Refused(format!("the file broke off: {}", status.message()));
        let rest = messages.map(move |message| message.map(|message| message.data).map_err(broken));
        Ok(Response::new(self.views.import(first, rest).await.or_status()?))
    }

    async fn list_views(&self, request: Request<ListViewsRequest>) -> Answer<ViewList> {
        let lookups = self.asked_by(&request, 0)?;
        let mut views = self.views.all().await.or_status()?;
        views.retain(|view| lookups.can_see_view(view));
        Ok(Response::new(ViewList { views }))
    }

    async fn get_view(&self, request: Request<GetViewRequest>) -> Answer<View> {
        let lookups = self.asked_by(&request, 0)?;
        Ok(Response::new(self.view(&lookups, request.get_ref()).await.or_status()?))
    }

    async fn delete_view(&self, request: Request<DeleteViewRequest>) -> Answer<View> {
        is_about(&request, |asked| asked.name.clone());
        Ok(Response::new(self.views.delete(request.into_inner().name).await.or_status()?))
    }

    async fn locate_blocks(&self, request: Request<LocateBlocksRequest>) -> Answer<LocateBlocksReply> {
        let lookups = self.asked_by(&request, 0)?;
        let request = request.into_inner();
        check_count(request.prefetch.len(), "files", PREFETCH_MAX)?;
        let wanted = GetViewRequest { id: request.view, ..GetViewRequest::default() };
        let _shown = self.view(&lookups, &wanted).await.or_status()?;
        Ok(Response::new(self.views.locate(request).await.or_status()?))
    }
}
