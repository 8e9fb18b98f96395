//go:build cgo && linux

#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "shim.h"

// librdmacm returns -1 with errno set; libibverbs returns a positive errno, and some of its drivers a negative one.
static int cm(int ret) { return ret ? (errno ? -errno : -EIO) : 0; }
static int positive(int ret) { return ret > 0 ? -ret : ret < -1 ? ret : cm(ret); }

struct farblk_send *farblk_alloc_sends(int n)
{
	struct farblk_send *w = calloc(n, sizeof *w);
	for (int i = 0; w && i < n; i++) {
		w[i].wr.sg_list = w[i].sge;
		w[i].wr.next = i + 1 < n ? &w[i + 1].wr : NULL;
	}
	return w;
}

struct farblk_recv *farblk_alloc_recvs(int n)
{
	struct farblk_recv *w = calloc(n, sizeof *w);
	for (int i = 0; w && i < n; i++) {
		w[i].wr.sg_list = w[i].sge;
		w[i].wr.next = i + 1 < n ? &w[i + 1].wr : NULL;
	}
	return w;
}

int farblk_post_send(struct ibv_qp *qp, struct farblk_send *w, int n, int *posted)
{
	struct ibv_send_wr *bad = NULL, *next = w[n - 1].wr.next;
	w[n - 1].wr.next = NULL;
	int ret = ibv_post_send(qp, &w->wr, &bad);
	w[n - 1].wr.next = next;
	*posted = !ret ? n : bad ? (int)((struct farblk_send *)bad - w) : 0;
	return positive(ret);
}

int farblk_post_recv(struct ibv_qp *qp, struct farblk_recv *w, int n, int *posted)
{
	struct ibv_recv_wr *bad = NULL, *next = w[n - 1].wr.next;
	w[n - 1].wr.next = NULL;
	int ret = ibv_post_recv(qp, &w->wr, &bad);
	w[n - 1].wr.next = next;
	*posted = !ret ? n : bad ? (int)((struct farblk_recv *)bad - w) : 0;
	return positive(ret);
}

int farblk_poll(struct ibv_cq *cq, struct ibv_wc *wc, int n) { return ibv_poll_cq(cq, n, wc); }

int farblk_arm(struct ibv_cq *cq) { return positive(ibv_req_notify_cq(cq, 0)); }

int farblk_cq_event(struct ibv_comp_channel *c)
{
	struct ibv_cq *cq;
	void *context;
	return cm(ibv_get_cq_event(c, &cq, &context));
}

int farblk_describe(struct ibv_context *v, int port, struct farblk_device *d)
{
	struct ibv_device_attr a;
	struct ibv_port_attr p;
	int ret = ibv_query_device(v, &a);
	if (ret)
		return positive(ret);
	if ((ret = ibv_query_port(v, port, &p)))
		return positive(ret);
	memset(d, 0, sizeof *d);
	strncpy(d->name, ibv_get_device_name(v->device), sizeof d->name - 1);
	d->node_type = v->device->node_type;
	d->link_layer = p.link_layer;
	d->max_qp_wr = a.max_qp_wr;
	d->max_sge = a.max_sge;
	d->max_cqe = a.max_cqe;
	d->max_rd_atom = a.max_qp_rd_atom;
	d->max_init_rd_atom = a.max_qp_init_rd_atom;
	d->max_mr_size = a.max_mr_size;
	return 0;
}

int farblk_create_channel(struct rdma_event_channel **ch)
{
	errno = 0;
	*ch = rdma_create_event_channel();
	return *ch ? 0 : cm(-1);
}

int farblk_next_event(struct rdma_event_channel *ch, struct farblk_event *e)
{
	struct rdma_cm_event *ev;
	if (rdma_get_cm_event(ch, &ev))
		return cm(-1);
	e->type = ev->event;
	e->status = ev->status;
	e->id = ev->event == RDMA_CM_EVENT_CONNECT_REQUEST ? ev->id : NULL;
	e->responder_resources = ev->param.conn.responder_resources;
	e->initiator_depth = ev->param.conn.initiator_depth;
	e->retry_count = ev->param.conn.retry_count;
	e->rnr_retry_count = ev->param.conn.rnr_retry_count;
	e->private_len = ev->param.conn.private_data ? ev->param.conn.private_data_len : 0;
	if (e->private_len)
		memcpy(e->private_data, ev->param.conn.private_data, e->private_len);
	rdma_ack_cm_event(ev);
	return 0;
}

int farblk_create_id(struct rdma_event_channel *ch, struct rdma_cm_id **id, int ib)
{
	return cm(rdma_create_id(ch, id, NULL, ib ? RDMA_PS_IB : RDMA_PS_TCP));
}

int farblk_set_tos(struct rdma_cm_id *id, uint8_t tos)
{
	return cm(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, sizeof tos));
}

int farblk_bind_listen(struct rdma_cm_id *id, void *addr, int backlog)
{
	int ret = cm(rdma_bind_addr(id, addr));
	return ret ? ret : cm(rdma_listen(id, backlog));
}

int farblk_resolve_addr(struct rdma_cm_id *id, void *src, void *dst, int ms)
{
	return cm(rdma_resolve_addr(id, src, dst, ms));
}

int farblk_resolve_route(struct rdma_cm_id *id, int ms) { return cm(rdma_resolve_route(id, ms)); }

void farblk_addresses(struct rdma_cm_id *id, void *local, void *remote)
{
	memcpy(local, &id->route.addr.src_storage, sizeof id->route.addr.src_storage);
	memcpy(remote, &id->route.addr.dst_storage, sizeof id->route.addr.dst_storage);
}

static struct rdma_conn_param conn_param(struct farblk_params *p)
{
	return (struct rdma_conn_param){
		.private_data = p->private_len ? p->private_data : NULL,
		.private_data_len = p->private_len,
		.responder_resources = p->responder_resources,
		.initiator_depth = p->initiator_depth,
		.retry_count = p->retry_count,
		.rnr_retry_count = p->rnr_retry_count,
	};
}

int farblk_connect(struct rdma_cm_id *id, struct farblk_params *p)
{
	struct rdma_conn_param c = conn_param(p);
	return cm(rdma_connect(id, &c));
}

static void *connecting(void *arg)
{
	struct farblk_connecting *c = arg;
	c->result = farblk_connect(c->id, &c->params);
	return NULL;
}

int farblk_connect_start(struct farblk_connecting *c)
{
	// No signal of the Go runtime's is to come here: it would make the kernel start the call again.
	sigset_t all, before;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	c->result = -ECANCELED;
	int ret = pthread_create(&c->thread, NULL, connecting, c);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return -ret;
}

int farblk_connect_join(struct farblk_connecting *c, int ms, int *result)
{
	struct timespec end;
	clock_gettime(CLOCK_REALTIME, &end);
	end.tv_nsec += ms % 1000 * 1000000L;
	end.tv_sec += ms / 1000 + end.tv_nsec / 1000000000L;
	end.tv_nsec %= 1000000000L;
	if (pthread_timedjoin_np(c->thread, NULL, &end) == ETIMEDOUT)
		return 1;
	*result = c->result;
	return 0;
}

void farblk_connect_cancel(struct farblk_connecting *c) { pthread_cancel(c->thread); }

int farblk_accept(struct rdma_cm_id *id, struct farblk_params *p)
{
	struct rdma_conn_param c = conn_param(p);
	return cm(rdma_accept(id, &c));
}

int farblk_reject(struct rdma_cm_id *id, const void *data, uint8_t len) { return cm(rdma_reject(id, data, len)); }

int farblk_disconnect(struct rdma_cm_id *id) { return cm(rdma_disconnect(id)); }

int farblk_migrate(struct rdma_cm_id *id, struct rdma_event_channel *ch) { return cm(rdma_migrate_id(id, ch)); }

int farblk_destroy_id(struct rdma_cm_id *id) { return cm(rdma_destroy_id(id)); }

int farblk_alloc_pd(struct ibv_context *v, struct ibv_pd **pd)
{
	errno = 0;
	*pd = ibv_alloc_pd(v);
	return *pd ? 0 : cm(-1);
}

int farblk_reg_mr(struct ibv_pd *pd, uintptr_t addr, uint64_t len, int access, struct ibv_mr **mr)
{
	errno = 0;
	*mr = ibv_reg_mr(pd, (void *)addr, len, access);
	return *mr ? 0 : cm(-1);
}

int farblk_create_cq(struct ibv_context *v, int cqe, struct ibv_comp_channel **c, struct ibv_cq **cq)
{
	errno = 0;
	*c = ibv_create_comp_channel(v);
	if (!*c)
		return cm(-1);
	*cq = ibv_create_cq(v, cqe, NULL, *c, 0);
	if (!*cq) {
		int ret = cm(-1);
		ibv_destroy_comp_channel(*c);
		return ret;
	}
	return 0;
}

int farblk_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_cq *cq, int send, int recv, int sges)
{
	struct ibv_qp_init_attr a = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = send, .max_recv_wr = recv, .max_send_sge = sges, .max_recv_sge = 1 },
	};
	return cm(rdma_create_qp(id, pd, &a));
}

int farblk_qp_error(struct ibv_qp *qp)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_ERR };
	return positive(ibv_modify_qp(qp, &a, IBV_QP_STATE));
}

int farblk_rnr_timer(struct ibv_qp *qp, uint8_t timer)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTS, .cur_qp_state = IBV_QPS_RTS, .min_rnr_timer = timer };
	return positive(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_MIN_RNR_TIMER));
}
